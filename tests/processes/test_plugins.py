"""An objective and a strategy from another package are found, trained, planned and launched.

`tests/plugin` is a package as somebody would install it: a folder with entry points on the path.
"""

import json
import os

import pytest

TRAIN = """
import json, sys
from pathlib import Path
from forked import losses, train
from sciftune.core.rundir import RunDir

folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
print(json.dumps({name: losses(train(RunDir(folder / name), **runs[name])) for name in runs}))
"""
RUNS = {
    "flow": {},
    "near": {"objective": "huber", "huber_delta": 1000.0},
    "far": {"objective": "huber", "huber_delta": 0.1},
    "ddp": {"strategy": "ddp", "num_processes": 2},
    "outside": {"strategy": "ddp_small_buckets", "num_processes": 2},
}
TINY = {
    "model": "qwenimage",
    "steps": 3,
    "figures": 16,
    "held_out": 4,
    "micro_batch": 2,
    "global_batch": 4,
    "resolution": 64,
    "text_tokens": 32,
    "validation_steps": 0,
    "checkpoint_steps": 0,
    "export": False,
}


@pytest.fixture(scope="module")
def environment(root):
    """Variables of a process that has the plug-in installed."""
    places = [root, root / "tests/plugin", root / "tests/tools"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}


@pytest.fixture(scope="module")
def trained(python, environment, tmp_path_factory):
    """RUNS in a process that has the plug-in installed; name -> step -> loss."""
    runs = json.dumps({name: TINY | fields for name, fields in RUNS.items()})
    done = python("-c", TRAIN, tmp_path_factory.mktemp("plugins"), runs, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_objective_from_outside(trained):
    flow, near, far = (trained[name] for name in ("flow", "near", "far"))
    assert flow.keys() == near.keys() == {"1", "2", "3"}
    assert all(abs(near[step] / flow[step] - 1) < 1e-5 for step in flow)
    assert all(far[step] < 0.5 * flow[step] for step in flow)


def test_a_strategy_from_outside(trained):
    ddp, outside = trained["ddp"], trained["outside"]
    assert all(abs(outside[step] / ddp[step] - 1) < 1e-5 for step in ddp)


def test_its_fields_are_checked(python, environment):
    code = "import sys; from sciftune.core.recipe import resolve; resolve(**eval(sys.argv[1]))"

    def error(fields):
        return python("-c", code, fields, env=environment).stderr.splitlines()[-1]

    assert "huber_delta" in error({"model": "qwenimage", "huber_delta": 2.0})
    assert "does not suit sd15" in error({"model": "sd15", "objective": "huber"})


def test_it_is_planned(python, environment, tmp_path):
    code = """
import sys
from pathlib import Path
from sciftune.core.recipe import resolve
from sciftune.core.rundir import new_run
from sciftune.lab.prepare import plan_run

recipe = resolve(
    model="qwenimage", objective="huber", strategy="ddp_small_buckets", num_processes=2, cpu=True,
    run_root=sys.argv[1],
)
run = new_run(recipe)
recipe.save(run.recipe)
print(plan_run(recipe, run.plan).chosen)
assert "torch" not in sys.modules
"""
    done = python("-c", code, tmp_path, env=environment)
    assert done.stdout.strip().endswith("ddp_small_buckets"), done.stderr[-3000:]
