"""Flow-GRPO under the engines: the same numbers on one process and on two, and resumed.

In fresh forked processes, tiny models, fp32.
"""

import shutil

import pytest
from forked import ENGINES, deviation, losses, train
from pairwise import engines_and_ranks
from rewarded import SMALL

from sciftune.core.rundir import RunDir

BASE = SMALL | dict(
    objective="flow_grpo",
    reward="5*rewarded:brightness",
    rollout_steps=4,
    trained_sampling_steps=2,
    start_kl_weight=0.1,
)
NUMBERS = ("loss", "grad_norm", "reward", "reward_std", "kl")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("grpo")


@pytest.fixture(scope="module")
def single(root):
    return {rank: train(RunDir(root / f"single-{rank}"), lora_rank=rank, **BASE) for rank in (0, 4)}


def held(metrics):
    return losses(metrics, "held_out_reward")


@pytest.mark.parametrize("engine,rank", engines_and_ranks(("ddp", 0), ("fsdp", 4)))
def test_two_processes_equal_one(root, single, engine, rank):
    run = RunDir(root / f"{engine}-{rank}")
    made = train(run, num_processes=2, lora_rank=rank, **BASE, **ENGINES[engine])
    assert set(losses(made)) == {1, 2, 3, 4}
    assert losses(made, "kl")[4] > 1e-7 and losses(made, "reward_std")[1] > 0
    assert deviation(made, single[rank], "reward") <= 1e-6
    assert deviation(made, single[rank], "grad_norm") <= 1e-5
    for name in ("reward_std", "kl", "loss"):  # the loss is near zero
        for step, value in losses(single[rank], name).items():
            assert abs(losses(made, name)[step] - value) <= 1e-6, (name, step)
    assert held(made)[4] == pytest.approx(held(single[rank])[4], abs=1e-6)


def test_a_resumed_run_repeats_nothing(root, single):
    run = RunDir(root / "resumed")
    shutil.copytree(root / "single-4", run.path)
    for step in ("000003", "000004"):
        shutil.rmtree(run.checkpoints / f"step_{step}", ignore_errors=True)
    (run.path / "metrics.jsonl").unlink()
    made = train(run, lora_rank=4, resume="latest", **BASE)
    assert min(losses(made)) == 3
    for name in NUMBERS:
        whole = losses(single[4], name)
        assert all(value == whole[step] for step, value in losses(made, name).items()), name
    assert made[-1] and held(made)[4] == held(single[4])[4]


def test_the_reward_rises(root):
    "Brighter pictures, after some steps of all weights and no divergence to hold them."
    fields = dict(steps=16, learning_rate=3e-3, ppo_clip=0.1, start_kl_weight=0)
    fields |= dict(validation_steps=16, checkpoint_steps=0, held_out=6)
    made = train(RunDir(root / "rises"), **BASE | fields)
    before, after = held(made)[0], held(made)[16]
    assert after > before + 0.02, (before, after)
