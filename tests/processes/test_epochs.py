"""`num_train_epochs` through a launch: counted by the plan, trained, resumed on two processes."""

import json
import sys

import pytest
from shared_figures import share_figures

from sciftune.core.plan import Plan
from sciftune.core.recipe import Recipe
from sciftune.lab.jobs import launch, state
from sciftune.lab.prepare import prepare_run, recipe_from

SMALL = dict(
    resolution=64,
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
def launched(tmp_path, warm_python, monkeypatch):
    "Plan, start and follow the job of a run, as launch.ipynb does with its parameters."
    monkeypatch.setattr(sys, "executable", warm_python)
    share_figures(tmp_path / "runs")

    def run(**values):
        run = prepare_run(recipe_from(dict(run_root=str(tmp_path / "runs"), **values)))
        launch(run)
        assert state(run) == "finished", run.log.read_text()
        return run

    return run


def test_epochs_are_counted_trained_and_kept_over_a_resume(launched):
    run = launched(**SMALL, num_train_epochs=0.5)
    assert Recipe.load(run.recipe).steps == 2  # 10 samples
    assert [row["step"] for row in run.read_metrics() if "loss" in row] == [1, 2]
    assert "num_train_epochs=0.5: 2 steps of 8 samples" in Plan.load(run.plan).notes
    assert "num_train_epochs=0.5: 2 steps of 8 samples" in run.log.read_text()

    two = dict(strategy="ddp", num_processes=2)
    launched(**SMALL, **two, num_train_epochs=2, resume="latest")  # 40 samples
    assert Recipe.load(run.recipe).steps == 5
    steps = [row["step"] for row in run.read_metrics() if "loss" in row]
    assert steps == [1, 2, 3, 4, 5]
    assert json.loads(run.record.read_text())["world_size"] == 2


def test_epochs_of_packs_end_with_their_last_sample(launched):
    packed = dict(model="bagel", figures=16, held_out=2, max_tokens=768, validation_steps=0)
    packed |= dict(expected_tokens=512, max_sample_tokens=512, export=False, cpu=True, name="packs")
    packed |= dict(num_train_epochs=1, global_batch=2, lr_schedule="constant")
    run = launched(**packed)
    steps = Recipe.load(run.recipe).steps
    rows = [row for row in run.read_metrics() if "total_samples" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    examples = json.loads(run.record.read_text())["samples"]["train"]
    assert examples <= rows[-1]["total_samples"] < 2 * examples
    assert f"num_train_epochs=1: {steps} steps of 2 packed sequences" in run.log.read_text()
