"""The launch notebook under papermill, and what must hold in a fresh process."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import jobs
import nbformat
import pytest
from PIL import Image
from shared_figures import share_figures

from sciftune.core.failures import first_failure
from sciftune.core.recipe import Recipe
from sciftune.core.rundir import RunDir
from sciftune.lab.command import settings_of
from sciftune.lab.jobs import LaunchError, processes, state
from sciftune.lab.prepare import prepare_run, recipe_from

SMALL = dict(
    preset="tiny",
    steps=3,
    lr_schedule="constant",
    figures=24,
    held_out=4,
    validation_steps=3,
    validation_images=1,
    validation_sample_steps=2,
    checkpoint_steps=0,
)


def parameters(**values):
    return [x for k, v in values.items() for x in ("-p", k, str(v))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "Shared, so that figures and embeddings are made once."
    folder = tmp_path_factory.mktemp("launch") / "runs"
    share_figures(folder)
    return folder


@pytest.fixture(scope="module")
def papermill(root, tmp_path_factory, runs, warm_python):
    "Run nbs/launch.ipynb with parameters, from an empty folder: the process, and what it wrote."

    def call(*options, **values):
        here = tmp_path_factory.mktemp("here")
        words = [
            warm_python,
            "-m",
            "papermill",
            root / "nbs/launch.ipynb",
            here / "out.ipynb",
            "--no-progress-bar",
            *options,
            *parameters(run_root=runs, **values),
        ]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=here)
        return done, here / "out.ipynb"

    return call


@pytest.fixture(scope="module")
def inside(papermill, root, runs):
    "A run that was launched from inside nbs, and its notebook."
    r, written = papermill("--cwd", root / "nbs", **SMALL, name="inside")
    assert r.returncode == 0, r.stderr
    return RunDir(runs / "inside"), written


def losses(run):
    return [r["loss"] for r in run.read_metrics() if "loss" in r]


def test_launching_imports_no_torch(python):
    code = """
import sys
import sciftune.lab.command, sciftune.lab.plots, sciftune.lab.report

heavy = {"torch", "accelerate", "diffusers", "transformers"}
print(sorted(heavy & sys.modules.keys()))
"""
    r = python("-c", code)
    assert r.stdout.strip() == "[]", r.stdout + r.stderr


def test_a_plan_that_does_not_fit_says_so_once(python, warm_python):
    words = ("model=klein", "preset=local", "strategy=single", "num_processes=1", "offload=none")
    card = ("plan_device=H200", "device_memory_gib=24")
    r = python("-m", "sciftune.lab.command", "plan", *words, *card, program=warm_python)
    assert r.returncode == 1, r.stderr
    assert "\ndoes not fit: single" in r.stdout
    assert (r.stdout + r.stderr).count("x H200: ") == 1


def test_a_wrong_parameter_ends_the_run(papermill, runs):
    done, _ = papermill(modle="x")
    assert done.returncode == 1, done.stderr
    assert "unknown parameter 'modle' (did you mean 'model'?)" in done.stderr
    assert [p.name for p in runs.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(steps="abc"), "steps: Input should be a valid integer"),
        (dict(data="/nowhere"), "data: no such file or folder: /nowhere"),
    ],
)
def test_wrong_values_leave_no_folder(runs, given, message):
    with pytest.raises(LaunchError, match=message):
        prepare_run(recipe_from(dict(run_root=str(runs), **given)))
    assert [p.name for p in runs.iterdir()] == ["cache"]


@pytest.fixture(scope="module")
def paper(papermill, runs):
    "A run that was only prepared."
    lists = "{validation_prompts: [a plot, a map], learning_rate: 2.0e-4}"
    done, _ = papermill("-y", lists, **SMALL, launcher="print", name="paper", caption_dropout=0.2)
    assert done.returncode == 0, done.stderr
    return RunDir(runs / "paper")


def test_print_writes_the_files_only(paper):
    run = paper
    assert {p.name for p in run.path.iterdir()} == {
        "recipe.yaml",
        "plan.json",
        "accelerate.yaml",
        "command.txt",
        "launch.json",
        "slurm.sh",
        "resume.yaml",
    }
    assert (
        "caption_dropout: 0.2" in run.recipe.read_text()
        and str(run.recipe) in run.command.read_text()
    )
    plan = json.loads(run.plan.read_text())
    assert (
        plan["chosen"] == "single"
        and plan["device_memory_gib"] > 0
        and any(r["strategy"] == "single" and r["fits"] for r in plan["rows"])
    )
    assert state(run) == "prepared"


def test_run_from_inside_nbs(inside, runs, warm_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python)
    run, written = inside
    rows = [r for r in run.read_metrics() if "loss" in r]
    assert [r["step"] for r in rows] == [1, 2, 3] and all(
        {"lr", "grad_norm", "step_time"} <= r.keys() for r in rows
    )
    assert (
        state(run) == "finished"
        and len(re.findall("<(?:img|svg)", run.report.with_suffix(".html").read_text())) >= 6
        and (run.model / "model_index.json").exists()
    )
    out = nbformat.read(written, 4)
    last = [
        o.text
        for c in out.cells
        if c.cell_type == "code"
        for o in c.outputs
        if o.output_type == "stream" and o.name == "stdout"
    ][-1]
    assert last.strip() == f"report: {run.path}/report.html"
    given = SMALL | dict(run_root=str(runs), name="inside")
    again = "has been trained already; choose another name, or resume=latest"
    with pytest.raises(LaunchError, match=again):
        prepare_run(recipe_from(given))
    again = dict(run_root=str(runs), name="inside", resume="latest")
    jobs.begin(recipe_from(again | dict(steps=5)))
    jobs.wait(lambda: state(run) != "running")
    assert state(run) == "finished", run.log.read_text()
    assert [r["step"] for r in run.read_metrics() if "loss" in r] == [1, 2, 3, 4, 5]
    assert "resumed from step_000003" in run.log.read_text()


def test_failed_training_fails_the_notebook(papermill, tmp_path, runs):
    bad = tmp_path / "data"
    bad.mkdir()
    Image.effect_noise((64, 64), 90).save(bad / "a.png")
    os.truncate(bad / "a.png", 1000)  # its header says nothing of it
    (bad / "a.txt").write_text("a caption")
    own = {name: value for name, value in SMALL.items() if name != "figures"}
    r, _ = papermill(**own, name="bad", data=bad)
    assert (
        r.returncode == 1
        and "RunFailedError: the run failed with exit code" in r.stderr
        and "DataError" in r.stderr
    ), r.stderr[-3000:]
    run = RunDir(runs / "bad")
    assert state(run) == "failed" and not run.model.exists()
    first = first_failure(run)
    assert (first.rank, first.type, first.traceback) == (0, "DataError", "")
    assert [finding.name for finding in first.findings] == ["unreadable data"]


LAUNCH = """
import signal, sys
# ignored where a script runs the tests in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
from sciftune.core.recipe import resolve
from sciftune.lab.jobs import launch
from sciftune.lab.prepare import prepare_run

recipe = resolve(
    run_root=sys.argv[1],
    steps=100000,
    figures=24,
    held_out=4,
    validation_steps=0,
    checkpoint_steps=0,
)
launch(prepare_run(recipe))
"""


def test_a_job_outlives_its_kernel_and_ends_with_an_interrupt(tmp_path, runs):
    def start():
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(runs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )

    run = RunDir(runs / "qwenimage-tiny-single-1")
    first = start()
    try:
        while not run.metrics.exists() and first.poll() is None:
            time.sleep(0.2)
        first.kill()
        first.wait()
        assert state(run) == "running"
        second = start()  # the same recipe: attaches, and makes no second run
        line = next((line for line in second.stdout if line.startswith("attached")), "")
        assert str(run.path) in line and not (runs / "qwenimage-tiny-single-2").exists()
        second.send_signal(signal.SIGINT)
        said = second.stdout.read()
        assert "interrupted: the job and its" in said and second.wait() != 0
        command = shlex.split(re.search(r"^  sciftune run (.*)", said, re.M)[1])
        continued = recipe_from(settings_of(command))
        assert continued == Recipe.load(run.recipe).model_copy(update=dict(resume="latest"))
        assert state(run) == "stopped" and not processes(run)
    finally:
        for p in processes(run):
            p.kill()


def test_recipe_goes_round_through_the_command_line(papermill, runs, paper):
    "A kept recipe is a valid parameter file."
    done, _ = papermill("-f", paper.recipe, name="two")
    assert done.returncode == 0, done.stderr
    one, two = (RunDir(runs / name).recipe.read_text() for name in ("paper", "two"))
    assert "learning_rate: 0.0002" in one and "- a map" in one
    assert two == one.replace("name: paper", "name: two")


@pytest.mark.parametrize(
    "strategy, count", [pytest.param("single", 1, marks=pytest.mark.slow), ("ddp", 2)]
)
def test_launcher_notebook_trains_the_same(
    inside, papermill, runs, strategy, count, tmp_path, monkeypatch
):
    """On one process or two.

    The ranks forked from the kernel take the steps of the job of `inside`, and nothing is left of
    planning and training in the temporary folder.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = losses(inside[0])
    r, _ = papermill(
        **(SMALL | dict(validation_steps=0, export=False)),
        launcher="notebook",
        name=f"forks-{count}",
        strategy=strategy,
        num_processes=count,
    )
    assert r.returncode == 0, r.stderr
    run = RunDir(runs / f"forks-{count}")
    assert (
        losses(run) == pytest.approx(job[:3], rel=1e-5)
        and len(job) >= 3
        and "step 3/3" in run.log.read_text()
        and state(run) == "finished"
    )
    assert not list(tmp_path.iterdir())
