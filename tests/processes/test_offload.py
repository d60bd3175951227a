"""Optimizer states and weights streamed from host memory train as resident ones do.

Through checkpoints, averages, validation and exports, too.

FSDP2 gathers ahead without changing a number.
"""

import json
from unittest import mock

import forked
import pytest
import torch

from sciftune.core.rundir import RunDir
from sciftune.models import qwenimage
from sciftune.models.family import get_family
from sciftune.models.weights import Weights
from sciftune.training.checkpoints import CheckpointTensors

BASE = dict(
    model="klein",
    steps=4,
    micro_batch=2,
    global_batch=2,
    text_tokens=32,
    figures=16,
    held_out=2,
    validation_steps=0,
    checkpoint_steps=2,
    checkpoints_kept=3,
    export=False,
    max_grad_norm=0,
    precision="fp32",
)


def small(rank, run):
    "The stand-in's parameters are all below the size that is worth streaming."
    import sciftune.strategies.offload as o

    o.SMALLEST = 200


def trained(root, name, sabotage=None, **fields):
    run = RunDir(root / name)
    codes = forked.wait(forked.start(run, forked.recipe_of(run, **BASE | fields), sabotage))
    assert not any(codes), forked.log(run)[-3000:]
    return run, forked.losses(run.read_metrics())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("offload")


def test_streamed_states_train_and_resume_as_resident_ones(root):
    held, want = trained(root, "held")
    run, got = trained(root, "streamed", small, offload="optimizer")
    assert got == want
    (root / "again" / "checkpoints").mkdir(parents=True)
    first = sorted(held.checkpoints.glob("step_*"))[0]
    _, again = trained(root, "again", small, offload="optimizer", resume=str(first))
    assert again == {s: want[s] for s in (3, 4)}  # states written by the resident optimizer
    half = sorted(run.checkpoints.glob("step_*"))[0]
    _, back = trained(root, "back", resume=str(half))
    assert back == again  # and the other way round
    row = next(r for r in run.read_metrics() if r.get("event") == "launch")
    assert (
        row["step"] == 1
        and {"imports", "engine", "loading", "first step"} <= row["seconds"].keys()
        and abs(row["total"] - sum(row["seconds"].values())) < 1e-6
    )


BLOCKS = 5  # of the model whose weights are streamed


@pytest.fixture(scope="module")
def deep(root):
    "A stand-in of more blocks than are on the device at once."
    with mock.patch.dict(qwenimage.TINY_QWEN_IMAGE, num_layers=BLOCKS):
        folder = get_family("qwenimage").tiny(root / "deep")
    return dict(model="qwenimage", model_path=str(folder))


def watched(rank, run):
    "As `small`; keeps how many blocks are streamed and how many of them were there at once."
    import sciftune.strategies.streamed_weights as w

    small(rank, run)
    real = w.HostWeights.use

    def use(self, number, phase):
        real(self, number, phase)
        held = [sum(p.untyped_storage().nbytes() for p in b.params) for b in self.blocks]
        seen.append(sum(map(bool, held)))
        uses = dict(blocks=len(held), most=max(seen), least=min(seen))
        (run.path / "uses.json").write_text(json.dumps(uses))

    seen = []
    w.HostWeights.use = use


def check_uses(run):
    "All blocks were streamed; the one in use and the next one were there."
    assert json.loads((run.path / "uses.json").read_text()) == dict(blocks=BLOCKS, most=2, least=1)


def tensors_of(run, state):
    found = CheckpointTensors(run.checkpoints / "step_000004", "denoiser", state)
    return {k: found[k].clone() for k in found}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


LOOKED_AT = dict(
    gradient_checkpointing="full",
    ema_decay=0.5,
    validation_ema=True,
    validation_steps=2,
    validation_images=1,
    validation_sample_steps=2,
    export=True,
)


def test_streamed_weights_train_and_resume_as_resident_ones(root, deep):
    """Losses, held-out losses, pictures, checkpoints, averages and exports are the same bits.

    A checkpoint of either goes on under the other.
    """
    ways = dict(none=None, optimizer=small, params=watched)
    made = {
        kind: trained(root, f"looked-{kind}", spy, offload=kind, **deep, **LOOKED_AT)
        for kind, spy in ways.items()
    }
    held, want = made["none"]
    for kind in ("optimizer", "params"):
        run, got = made[kind]
        assert len(want) == 4 and got == want
        for key, steps in (("held_out", 3), ("changed", 2)):
            own, other = (forked.losses(r.read_metrics(), key) for r in (run, held))
            assert len(own) == steps and own == other
        for state in ("weight", "exp_avg", "exp_avg_sq", "ema"):
            assert equal(tensors_of(run, state), tensors_of(held, state)), state
        exported, other = (dict(Weights(r.model / "transformer")) for r in (run, held))
        assert equal(exported, other)
        pictures = [r.validation_images / "step_000004" / "00.png" for r in (run, held)]
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
    check_uses(made["params"][0])
    half = "checkpoints/step_000002"
    for first, then in (("none", "params"), ("params", "optimizer")):
        resumed = deep | dict(offload=then, resume=str(made[first][0].path / half))
        _, again = trained(root, f"{first}-{then}", ways[then], **LOOKED_AT | resumed)
        assert again == {s: want[s] for s in (3, 4)}, (first, then)


@pytest.mark.parametrize(
    "fields",
    [
        dict(precision="bf16-mixed", max_grad_norm=0.1),
        dict(lora_rank=4, gradient_checkpointing="none"),
        dict(trained_layers="transformer_blocks.1-3", gradient_checkpointing="full"),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_streamed_weights_go_with(root, deep, fields):
    "As streamed states alone: under autocast, below adapters, where some layers are trained."
    name, fields = next(iter(fields)), deep | fields
    plain = trained(root, f"{name}-optimizer", small, offload="optimizer", **fields)[1]
    run, streamed = trained(root, f"{name}-params", watched, offload="params", **fields)
    assert len(plain) == 4 and streamed == plain
    check_uses(run)


@pytest.mark.parametrize(
    "fields,most",
    [
        (dict(prefetch=2), 0.0),
        pytest.param(
            dict(reduce_type="bf16", precision="bf16-mixed"), 2e-2, marks=pytest.mark.slow
        ),
    ],
)
def test_fsdp_gathers_ahead_and_sums_in_bf16(root, fields, most):
    plain = trained(
        root,
        f"fsdp-{len(fields)}",
        strategy="fsdp",
        num_processes=2,
        global_batch=4,
        checkpoint_steps=0,
        **{k: v for k, v in fields.items() if k == "precision"},
    )[1]
    other = trained(
        root,
        f"fsdp-{len(fields)}-other",
        strategy="fsdp",
        num_processes=2,
        global_batch=4,
        checkpoint_steps=0,
        **fields,
    )[1]
    assert max(abs(plain[s] / other[s] - 1) for s in plain) <= most and (
        most == 0 or plain != other
    )
