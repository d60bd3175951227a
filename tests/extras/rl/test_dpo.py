"""Diffusion-DPO under the engines: the same numbers on one process and on two, and resumed.

In fresh forked processes, tiny models, fp32.
"""

import shutil

import pytest
from forked import ENGINES, deviation, losses, train
from pairwise import engines_and_ranks
from rewarded import SMALL

from sciftune.core.rundir import RunDir

BASE = SMALL | dict(
    objective="diffusion_dpo",
    reward="rewarded:brightness",
    rollout_steps=3,
    dpo_beta=20,
)
NUMBERS = ("loss", "reward", "reward_std", "dpo_margin", "dpo_won", "error_chosen")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dpo")


@pytest.fixture(scope="module")
def single(root):
    return {rank: train(RunDir(root / f"single-{rank}"), lora_rank=rank, **BASE) for rank in (0, 4)}


@pytest.mark.parametrize("engine,rank", engines_and_ranks(("zero2", 0), ("fsdp", 4)))
def test_two_processes_equal_one(root, single, engine, rank):
    run = RunDir(root / f"{engine}-{rank}")
    made = train(run, num_processes=2, lora_rank=rank, **BASE, **ENGINES[engine])
    assert set(losses(made)) == {1, 2, 3, 4}
    assert deviation(made, single[rank], "grad_norm") <= 1e-4
    for name in ("reward", "reward_std", "error_chosen"):
        for step, value in losses(single[rank], name).items():
            assert abs(losses(made, name)[step] - value) <= 1e-6, (name, step)
    assert deviation(made, single[rank]) <= 1e-6


def test_a_resumed_run_repeats_nothing(root, single):
    run = RunDir(root / "resumed")
    shutil.copytree(root / "single-4", run.path)
    shutil.rmtree(run.checkpoints / "step_000004")
    (run.path / "metrics.jsonl").unlink()
    made = train(run, lora_rank=4, resume="latest", **BASE)
    assert min(losses(made)) == 3
    for name in NUMBERS:
        whole = losses(single[4], name)
        assert all(value == whole[step] for step, value in losses(made, name).items()), name
