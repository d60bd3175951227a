"""ddp with `shard_states` trains, keeps and resumes as the others.

FlashAdamW, which it needs, runs on GPUs; a plain AdamW that updates during backward stands in.
"""

import forked
import pytest
import torch
from small_unets import small_unet

from sciftune.core.rundir import RunDir
from sciftune.project.ranks import JointAdamW
from sciftune.strategies import ddp, trained_module

BASE = dict(
    model="qwenimage",
    preset="tiny",
    resolution=64,
    text_tokens=32,
    steps=4,
    checkpoint_steps=2,
    checkpoints_kept=2,
    validation_steps=2,
    micro_batch=1,
    global_batch=3,
    figures=16,
    max_grad_norm=0.0,  # updates during backward clip by the norm of the step before
    ema_decay=0.9,
    export=False,
)
SHARDS = dict(strategy="ddp", num_processes=3, shard_states=True)


@pytest.fixture
def released(monkeypatch):
    "ddp updates during backward, on CPUs too."
    build = trained_module.build_optimizer

    def built(params, recipe, kind, cuda):
        if recipe.strategy != "ddp":
            return build(params, recipe, kind, cuda)
        return JointAdamW(params, lr=recipe.learning_rate, foreach=False, fused=False)

    monkeypatch.setattr(trained_module, "build_optimizer", built)
    monkeypatch.setattr(ddp.DDP, "releases_gradients", property(lambda self: True))


def close(run, other, first=1, names=("loss", "grad_norm", "held_out")):
    "Compare what was recorded from a step on."
    for name in names:
        values, others = (
            {row["step"]: row[name] for row in r.read_metrics() if row.get(name) is not None}
            for r in (run, other)
        )
        steps = [step for step in values if step >= first]
        assert steps and steps == [step for step in others if step >= first]
        found, right = (torch.tensor([v[step] for step in steps]) for v in (values, others))
        torch.testing.assert_close(found, right, rtol=2e-6, atol=0)


@pytest.mark.usefixtures("released")
def test_states_in_shards_train_and_resume_as_one_process(tmp_path):
    single, shards, later, back = (RunDir(tmp_path / n) for n in ("single", "shards", "l", "b"))
    forked.train(single, **BASE)
    forked.train(shards, **BASE | SHARDS)
    close(shards, single)
    middle = dict(resume=str(single.checkpoints / "step_000002"))
    forked.train(later, **BASE | SHARDS | middle)
    close(later, single, 3)
    middle = dict(resume=str(shards.checkpoints / "step_000002"))
    forked.train(back, **BASE | dict(strategy="fsdp", num_processes=3) | middle)
    close(back, single, 3)


@pytest.mark.usefixtures("released")
def test_several_networks_train_as_in_one_process(tmp_path):
    single, shards = (RunDir(tmp_path / name) for name in ("single", "shards"))
    unlike = dict(model="sd15", objective="dmd2", steps=2, checkpoint_steps=0, validation_steps=0)
    several = BASE | unlike | dict(ema_decay=0.0, model_path=small_unet("sd15", tmp_path))
    del several["text_tokens"]
    forked.train(single, **several)
    forked.train(shards, **several | SHARDS)
    close(shards, single, names=("loss", "grad_norm"))
