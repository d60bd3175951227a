"""Keep the best, stop early, and what else a resume must continue exactly."""

import torch
from forked import deviation, log, losses, recipe_of, start, train, wait

from sciftune.core.rundir import RunDir
from sciftune.lab.sample import checkpoint_sources, find_weights
from sciftune.models.weights import Weights
from sciftune.training.checkpoints import CheckpointTensors

BASE = dict(
    model="qwenimage",
    figures=24,
    held_out=4,
    micro_batch=2,
    validation_images=0,
    validation_steps=2,
    checkpoint_steps=3,
    checkpoints_kept=1,
    steps=10,
    keep_best="held_out",
)
FREE = dict(
    optimizer="schedulefree",
    learning_rate=3e-2,
    lr_groups="{attn: {rate: 0.5, from_step: 2, warmup_steps: 4}}",
    timestep_shift="linear",
    sigma_range="0.5-1, 4:0-0.6",
)
AVERAGE = dict(ema_decay=0.99, ema_warmup=True, optimizer="adafactor", lr_schedule="constant")


def held_out(metrics):
    return {r["step"]: r["held_out"] for r in metrics if "held_out" in r}


def steps_kept(run):
    return sorted(int(p.name.removeprefix("step_")) for p in run.checkpoints.glob("step_*"))


def fields_and_rest(tmp_path, name, more):
    "A run that is interrupted by a lost end, and one that is not: the same numbers."
    whole = train(RunDir(tmp_path / name), **BASE | more)
    run = RunDir(tmp_path / f"{name}-again")
    train(run, **BASE | more | dict(steps=6, export=False))
    again = train(run, **BASE | more | dict(resume="latest"))
    assert deviation(again, whole) == 0, log(run)
    assert held_out(again) == held_out(whole)
    return RunDir(tmp_path / name), run, held_out(whole)


def test_resumes_with_the_best_and_exports_it(tmp_path):
    """Averages of the optimizer and of an EMA: the best checkpoint survives and is exported."""
    for name, more in (("free", FREE), ("average", AVERAGE)):
        whole, again, values = fields_and_rest(tmp_path, name, more)
        best = min((step for step in values if step), key=values.get)
        for run in (whole, again):
            assert steps_kept(run) == sorted({best, 10}), values
            assert find_weights(run.path, "ema").step == best
            assert [s.step for s in checkpoint_sources(run.path, "all")] == steps_kept(run)
            average = CheckpointTensors(run.checkpoints / f"step_{best:06d}", "denoiser", "ema")
            exported = Weights(run.model / "transformer")
            for key in average:
                assert torch.equal(average[key].bfloat16(), exported[key].reshape(-1)), key


def test_validates_the_step_at_which_it_was_stopped(tmp_path):
    "A stop on request saves its step without a validation that is due; the resume brings it."
    plain, run = BASE | dict(keep_best="", lr_schedule="constant"), RunDir(tmp_path / "again")
    whole = train(RunDir(tmp_path / "whole"), **plain)
    train(run, **plain | dict(steps=6, export=False))
    rows = run.metrics.read_text().splitlines(keepends=True)
    left = [row for row in rows if '"step": 6, "held_out"' not in row]
    assert len(left) == len(rows) - 1
    run.metrics.write_text("".join(left))
    assert held_out(train(run, **plain | dict(resume="latest"))) == held_out(whole), log(run)


def test_stops_early_and_stays_complete(tmp_path):
    "At a rate that only makes it worse: the first validation is the best, two more end the run."
    run = RunDir(tmp_path / "early")
    bad = dict(learning_rate=0.5, patience=2, steps=40, max_grad_norm=0, stop_if_diverged=False)
    assert wait(start(run, recipe_of(run, **BASE | bad))) == [0], log(run)
    metrics = run.read_metrics()
    values = held_out(metrics)
    last = max(values)
    best = min((step for step in values if step), key=values.get)
    assert last == best + 4 < 40 and max(losses(metrics)) == last, values
    assert [r["step"] for r in metrics if r.get("event") == "finished"] == [last]
    assert steps_kept(run) == [best, last] and (run.model / "model_index.json").exists()
    assert wait(start(run, recipe_of(run, **BASE | bad, resume="latest"))) == [0], log(run)
    assert max(losses(run.read_metrics())) == last  # nothing is left to do


def test_a_number_that_no_validation_has(tmp_path):
    run = RunDir(tmp_path / "none")
    asked = dict(keep_best="follows", validation_images=1, validation_prompts="a photo of a cat")
    assert wait(start(run, recipe_of(run, **BASE | asked))) == [2]
    assert "keep_best: a validation of this run has no 'follows'" in log(run)
