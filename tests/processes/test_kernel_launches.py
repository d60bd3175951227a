"""Every strategy through accelerate's `notebook_launcher`, from one kernel."""

import os
import subprocess

import pytest
from shared_figures import share_figures

from sciftune.core.registry import records
from sciftune.core.rundir import RunDir
from sciftune.lab.jobs import state

SLOW = os.environ.get("SCIFTUNE_SLOW")
STRATEGIES = [name for name in records("strategies") if SLOW or name not in ("zero1", "zero2")]
KERNEL = """
import importlib.util, sys
from pathlib import Path

import sciftune.training.trainer  # once, for all forks
from sciftune.core.recipe import resolve
from sciftune.core.registry import find_record
from sciftune.core.rundir import RunDir
from sciftune.lab.jobs import RunFailedError, launch_here
from sciftune.strategies.launch_files import write_configs

if importlib.util.find_spec("deepspeed"):
    import deepspeed.runtime.engine
    import deepspeed.runtime.zero.stage3
for name in sys.argv[2:]:
    world = 1 if find_record("strategies", name).processes == "one" else 2
    run = RunDir(Path(sys.argv[1]) / name)
    run.path.mkdir()
    recipe = resolve(
        name=name, run_root=sys.argv[1], strategy=name, num_processes=world, cpu=True,
        launcher="notebook", resolution=64, figures=16, held_out=4, steps=2, micro_batch=1,
        global_batch=2, precision="fp32", validation_steps=0, checkpoint_steps=0, export=False,
        compile=False,
    )
    write_configs(recipe, run)
    try:
        launch_here(run)
    except RunFailedError as error:
        print(name, error, flush=True)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, warm_python):
    root = tmp_path_factory.mktemp("kernel")
    share_figures(root)
    done = subprocess.run(
        [warm_python, "-c", KERNEL, str(root), *STRATEGIES],
        env=os.environ | dict(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    return root, done


@pytest.mark.parametrize("name", STRATEGIES)
def test_trains_as_one_process(kernel, name):
    root, done = kernel
    first, run = (RunDir(root / n) for n in ("single", name))
    assert state(run) == "finished", done.stdout[-3000:] + done.stderr[-1000:]
    losses = [[row["loss"] for row in r.read_metrics() if "loss" in row] for r in (first, run)]
    assert len(losses[1]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_warning_in_the_log(kernel, name):
    log = RunDir(kernel[0] / name).log.read_text()
    assert "Warning" not in log, log
