"""A part of the model trained in fresh forked processes.

The same part on every engine, the rest bit for bit as it was.
"""

import pytest
import torch
from forked import ENGINES, deviation, log, losses, recipe_of, start, train, wait
from safetensors.torch import load_file

from sciftune.core.rundir import RunDir

PART = ("single_transformer_blocks.1.", "norm_out.", "proj_out.")
BASE = dict(
    model="klein",
    figures=32,
    held_out=8,
    micro_batch=2,
    global_batch=8,
    steps=8,
    validation_steps=0,
    checkpoint_steps=4,
    lr_schedule="constant",
    text_tokens=32,
    ema_decay=0.9,
    gradient_checkpointing="full",
    trained_layers="single_transformer_blocks.1,norm_out,proj_out",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("part")


@pytest.fixture(scope="module")
def single(root):
    run = RunDir(root / "single")
    return train(run, **BASE), run


def weights(folder):
    return load_file(next((folder / "transformer").glob("*.safetensors")))


def test_only_the_part_changes(root, single):
    before, after = weights(root / "cache" / "stand-ins" / "klein"), weights(single[1].model)
    assert before.keys() == after.keys() and {
        n for n in before if not torch.equal(before[n].bfloat16(), after[n])
    } == {n for n in before if n.startswith(PART)}


@pytest.mark.parametrize(
    "engine",
    [
        "fsdp",
        "zero3",
        *(pytest.param(e, marks=pytest.mark.slow) for e in ("ddp", "fsdp-noreshard", "zero2")),
    ],
)
def test_every_engine_trains_it_alike(root, single, engine):
    run = RunDir(root / engine)
    m = train(run, num_processes=2, **BASE, **ENGINES[engine])
    assert deviation(m, single[0]) <= 1e-5
    a, b = weights(run.model), weights(single[1].model)
    assert all(torch.equal(a[n], b[n]) for n in a if not n.startswith(PART))


def test_it_resumes_on_another_engine_but_not_with_another_part(root, single):
    checkpoint = str(single[1].checkpoints / "step_000004")
    fields = BASE | dict(resume=checkpoint)
    m = train(RunDir(root / "rest"), num_processes=2, **fields, **ENGINES["fsdp"])
    assert min(losses(m)) == 5 and deviation(m, single[0]) <= 1e-5
    other = RunDir(root / "other")
    codes = wait(start(other, recipe_of(other, **fields | dict(trained_layers="proj_out"))))
    said = f"trained_layers: {BASE['trained_layers']!r} in the checkpoint, 'proj_out' now"
    assert codes == [2] and said in log(other), log(other)
