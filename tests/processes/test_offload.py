"""Optimizer states streamed from host memory train as resident ones do, through checkpoints too.

FSDP2 gathers ahead without changing a number.
"""

import forked
import pytest

from sciftune.core.rundir import RunDir

BASE = dict(
    model="klein",
    steps=6,
    micro_batch=2,
    global_batch=2,
    text_tokens=32,
    figures=16,
    held_out=2,
    validation_steps=0,
    checkpoint_steps=3,
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
    assert again == {s: want[s] for s in (4, 5, 6)}  # states written by the resident optimizer
    half = sorted(run.checkpoints.glob("step_*"))[0]
    _, back = trained(root, "back", resume=str(half))
    assert back == again  # and the other way round
    row = next(r for r in run.read_metrics() if r.get("event") == "launch")
    assert (
        row["step"] == 1
        and {"imports", "engine", "loading", "first step"} <= row["seconds"].keys()
        and abs(row["total"] - sum(row["seconds"].values())) < 1e-6
    )


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
