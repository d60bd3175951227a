"""`num_train_epochs` through the real launch: counted, trained, resumed on two processes."""

import json

import pytest

from sciftune.core.plan import Plan
from sciftune.core.recipe import Recipe
from sciftune.core.rundir import RunDir

SMALL = dict(
    figures=24,
    held_out=4,
    global_batch=8,
    micro_batch=2,
    lr_schedule="constant",
    validation_steps=0,
    checkpoint_steps=1,
    export=False,
    cpu=True,
    name="epochs",
)


@pytest.fixture
def launched(python, root, tmp_path):
    "Run nbs/launch.ipynb with parameters."

    def call(**values):
        words = [x for k, v in values.items() for x in ("-p", k, str(v))]
        notebook = root / "nbs/launch.ipynb"
        out = tmp_path / "out.ipynb"
        given = (notebook, out, "--no-progress-bar", "-p", "run_root", tmp_path / "runs", *words)
        return python("-m", "papermill", *given, cwd=tmp_path)

    return call


def test_epochs_are_counted_trained_and_kept_over_a_resume(launched, tmp_path):
    run = RunDir(tmp_path / "runs" / "epochs")
    done = launched(**SMALL, num_train_epochs=0.5)
    assert done.returncode == 0, done.stderr
    assert Recipe.load(run.recipe).steps == 2  # 10 samples
    assert [row["step"] for row in run.read_metrics() if "loss" in row] == [1, 2]
    assert "num_train_epochs=0.5: 2 steps of 8 samples" in Plan.load(run.plan).notes
    assert "num_train_epochs=0.5: 2 steps of 8 samples" in run.log.read_text()

    two = dict(strategy="ddp", num_processes=2)
    done = launched(**SMALL, **two, num_train_epochs=2, resume="latest")  # 40 samples
    assert done.returncode == 0, done.stderr
    assert Recipe.load(run.recipe).steps == 5
    steps = [row["step"] for row in run.read_metrics() if "loss" in row]
    assert steps == [1, 2, 3, 4, 5]
    assert json.loads(run.record.read_text())["world_size"] == 2


def test_epochs_of_packs_end_with_their_last_sample(launched, tmp_path):
    run = RunDir(tmp_path / "runs" / "packs")
    packed = dict(model="bagel", figures=16, held_out=2, max_tokens=768, validation_steps=0)
    packed |= dict(expected_tokens=512, max_sample_tokens=512, export=False, cpu=True, name="packs")
    done = launched(**packed, num_train_epochs=1, global_batch=2, lr_schedule="constant")
    assert done.returncode == 0, done.stderr
    steps = Recipe.load(run.recipe).steps
    rows = [row for row in run.read_metrics() if "total_samples" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    examples = json.loads(run.record.read_text())["samples"]["train"]
    assert examples <= rows[-1]["total_samples"] < 2 * examples
    assert f"num_train_epochs=1: {steps} steps of 2 packed sequences" in run.log.read_text()
