"""Engines against each other, resumes across them, and runs that die.

In fresh forked processes, tiny models, fp32.
"""

import json
import os
import random
import shutil
import signal
import time

import psutil
import pytest
import torch
from forked import ENGINES, PATIENCE, deviation, log, losses, recipe_of, start, train, wait

from sciftune.core import checkpoint_folders as cf
from sciftune.core.rundir import RunDir
from sciftune.models.weights import Weights
from sciftune.training import checkpoints as ck
from sciftune.training import trainer
from sciftune.training.checkpoints import CheckpointTensors

HALF = 10 if os.environ.get("SCIFTUNE_SLOW") else 3  # steps
BASE = dict(
    model="qwenimage",
    resolution=64,
    figures=24,
    held_out=4,
    micro_batch=2,
    validation_steps=0,
    checkpoint_steps=HALF,
    steps=2 * HALF,
    lr_schedule="constant",
    export=False,
)
LONG = BASE | dict(steps=20)  # of the reference, and of what is asked to stop before its end
TWO = [(e, 2) for e in ("ddp", "fsdp", "zero1", "zero2", "zero3")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def reference(root):
    return train(RunDir(root / "reference"), **LONG | dict(checkpoint_steps=0))


@pytest.fixture(scope="module")
def ran(root, reference):
    made = {}

    def get(engine, n):
        if (engine, n) not in made:
            made[engine, n] = (
                train(
                    RunDir(root / f"{engine}-{n}"),
                    num_processes=n,
                    checkpoints_kept=9,
                    **BASE,
                    **ENGINES[engine],
                ),
                root / f"{engine}-{n}",
            )
        return made[engine, n]

    return get


@pytest.mark.parametrize("engine,n", TWO)
def test_losses_equal_single(ran, reference, engine, n):
    m, _ = ran(engine, n)
    assert set(losses(m)) == set(range(1, BASE["steps"] + 1))
    assert deviation(m, reference) <= 1e-5 and deviation(m, reference, "grad_norm") <= 1e-4


@pytest.mark.parametrize(
    "a,b",
    [
        (("ddp", 2), ("zero3", 2)),
        (("zero2", 2), ("fsdp", 2)),
        (("zero3", 2), ("single", 1)),
        (("fsdp", 2), ("ddp", 2)),
    ],
)
def test_resume_by_another_engine(root, ran, reference, a, b):
    _, source = ran(*a)
    m = train(
        RunDir(root / f"{a[0]}-to-{b[0]}"),
        num_processes=b[1],
        resume=str(source / "checkpoints" / cf.checkpoint_name(HALF)),
        **BASE,
        **ENGINES[b[0]],
    )
    assert min(losses(m)) == HALF + 1 and deviation(m, reference) <= 1e-5


def test_validation_images_and_export_while_sharded(root, reference):
    """ZeRO-3 samples with the trained weights, here the averaged ones.

    Another engine's pictures are the same, training goes on as if nobody had looked, and the
    export holds the average.
    """
    import numpy as np
    from PIL import Image

    conf = BASE | dict(
        steps=2,
        validation_steps=2,
        validation_images=1,
        validation_sample_steps=2,
        export=True,
        ema_decay=0.5,
        validation_ema=True,
    )
    made = {}
    for e, n in (("single", 1), ("zero3", 2), ("fsdp", 2)):
        run = RunDir(root / f"images-{e}")
        m = train(run, num_processes=n, **conf, **ENGINES[e])
        picture = Image.open(run.validation_images / "step_000002" / "00.png")
        made[e] = np.asarray(picture, int)
        assert [r["step"] for r in m if "held_out" in r] == [0, 2] and (
            run.model / "model_index.json"
        ).exists()
        assert deviation(m, reference) <= 1e-5
        average, made_of = (
            CheckpointTensors(run.checkpoints / "step_000002", "denoiser", "ema"),
            Weights(run.model / "transformer"),
        )
        assert (
            all(torch.equal(average[k].bfloat16(), made_of[k].reshape(-1)) for k in average)
            and len(average.keys()) > 50
        )
    for e in ("zero3", "fsdp"):
        assert abs(made[e] - made["single"]).max() <= 2


@pytest.mark.parametrize(
    "engine,n,precision",
    [
        ("single", 1, "bf16"),
        ("fsdp", 2, "bf16-mixed"),
        pytest.param("zero3", 2, "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_the_average_is_exact_in_low_precision(root, engine, n, precision):
    "From the weights of each step, in float64; a part on each rank, together the whole."
    run = RunDir(root / f"ema-{engine}")
    conf = dict(
        BASE,
        steps=4,
        checkpoint_steps=1,
        checkpoints_kept=9,
        ema_decay=0.9,
        learning_rate=1e-4,
        precision=precision,
    )
    train(run, num_processes=n, **conf, **ENGINES[engine])

    def read(step, state):
        return CheckpointTensors(run.checkpoints / cf.checkpoint_name(step), "denoiser", state)

    first, last = read(1, "ema"), read(4, "ema")
    weights = [read(step, "weight") for step in (2, 3, 4)]
    for k in first:
        e = first[k].double()
        for weight in weights:
            e = 0.9 * e + 0.1 * weight[k].double()
        moved = (last[k].double() - first[k].double()).norm()
        rounding = 4 * 2**-24 * e.norm()  # of fp32, of three updates
        assert (last[k].double() - e).norm() <= 1e-3 * moved + rounding, k


def aio():
    """Whether DeepSpeed can compile its asynchronous I/O here.

    It needs libaio with its header (Debian: libaio-dev) and a compiler.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible(verbose=False)


@pytest.mark.slow
def test_states_on_a_disk(root):
    """Parameters and optimizer states in files (offload='nvme'): the losses of `single`.

    On one and two processes, and resumed from and by it.
    """
    pytest.importorskip("deepspeed")
    if not aio():
        pytest.skip("no libaio")
    (root / "disk").mkdir()
    short = dict(BASE, steps=8, checkpoint_steps=4)
    disk = dict(strategy="zero3", offload="nvme", nvme_path=str(root / "disk"))
    want = train(RunDir(root / "disk-reference"), **short)
    for n in (1, 2):  # the first use compiles for minutes
        m = train(RunDir(root / f"disk-{n}"), num_processes=n, **short, **disk)
        assert deviation(m, want) <= 1e-5
    assert list((root / "disk").rglob("*rank1*")), "nothing was written there"
    shutil.rmtree(root / "disk-1" / "checkpoints" / "step_000008")
    run = RunDir(root / "disk-1")
    assert deviation(train(run, resume="latest", **short), want) <= 1e-5
    shutil.rmtree(root / "disk-1" / "checkpoints" / "step_000008")
    m = train(run, resume="latest", num_processes=2, **short, **disk)
    assert deviation(m, want) <= 1e-5


def wait_for_steps(run, ps, number):
    "Return when `number` steps are logged, or a process has ended."
    while len(losses(run.read_metrics())) < number and all(p.is_alive() for p in ps):
        time.sleep(0.01)


def kill_some(ps, rng):
    "SIGKILL to all or to one; how many were chosen."
    victims = ps if rng.random() < 0.5 else [rng.choice(ps)]
    for p in victims:
        if p.is_alive():
            os.kill(p.pid, signal.SIGKILL)
    return len(victims)


@pytest.mark.parametrize(
    "engine,n", [pytest.param("single", 1, marks=pytest.mark.slow), ("zero2", 2)]
)
def test_killed_at_random_moments(root, reference, engine, n):
    """Kill one rank or all, again and again (SCIFTUNE_KILLS times), resume each time.

    Nothing is lost but the steps since the last checkpoint.
    """
    kills, rng = int(os.environ.get("SCIFTUNE_KILLS", 2)), random.Random(engine)
    patience = PATIENCE + 20 * kills
    total = 5 * kills
    conf = dict(BASE, steps=total, checkpoint_steps=2, num_processes=n, **ENGINES[engine])
    if total > LONG["steps"]:
        reference = train(RunDir(root / f"unkilled-{engine}"), patience=patience, **conf)
    run = RunDir(root / f"killed-{engine}")
    recipe = recipe_of(run, resume="latest", **conf)
    deaths = inside = starts = 0
    while starts < 10 * kills:
        starts += 1
        ps = start(run, recipe)
        if deaths < kills:
            step = len(losses(run.read_metrics())) + 3
            wait_for_steps(run, ps, step)
            time.sleep(rng.random() * 0.2)
            killed = kill_some(ps, rng)
            deaths += 1
            inside += (half := bool(list(run.checkpoints.glob(".step_*"))))
            where = f"step {step}+{', inside a save' if half else ''}"
            print(f"{engine}: kill {deaths} of {killed} of {n} ranks, {where}", flush=True)
        if not any(wait(ps, patience)):
            break
        if run.checkpoints.exists() and list(run.checkpoints.glob("step_*")):
            assert cf.find_checkpoint(run, "latest"), "no good checkpoint left"
    m = run.read_metrics()
    print(f"{deaths} kills, {inside} inside a save, {starts} starts")
    assert set(losses(m)) == set(range(1, total + 1)), log(run)[-2000:]
    assert deviation(m, reference) <= 1e-5, log(run)[-2000:]


def test_sigterm_saves_and_stops(root, reference):
    """A scheduler asks a rank and the processes that make its batches.

    All ranks save and end, and so do those processes.
    """
    run = RunDir(root / "sigterm")
    conf = dict(LONG, checkpoint_steps=0, num_processes=2, data_workers=1, **ENGINES["ddp"])
    ps = start(run, recipe_of(run, **conf))
    while len(losses(run.read_metrics())) < 4:
        time.sleep(0.02)
        assert all(p.is_alive() for p in ps), log(run)
    makers = [c for p in ps for c in psutil.Process(p.pid).children()]
    assert len(makers) == 2
    for p in (*(m for m in makers if m.ppid() == ps[1].pid), psutil.Process(ps[1].pid)):
        p.terminate()  # one rank only: all must agree
    assert wait(ps) == [0, 0] and not any(m.is_running() for m in makers), log(run)
    stopped = [r["step"] for r in run.read_metrics() if r.get("event") == "stopped"][0]
    assert cf.complete_checkpoints(run)[-1].name == cf.checkpoint_name(
        stopped
    ) and "stopped on request" in log(run)
    m = train(run, **dict(conf, resume="latest"))
    assert set(losses(m)) == set(range(1, 21)) and deviation(m, reference) <= 1e-5


def test_usr1_saves_and_an_impatient_launcher_leaves_no_half(root, reference):
    """SIGUSR1 as Slurm sends it, then SIGTERMs while the checkpoint is written: it is completed.

    Killed while writing, because the grace was over: the one before stands.
    """

    def slow(rank, run):
        real = ck.dcp.save

        def save(*a, **k):
            metadata = real(*a, **k)
            time.sleep(1.5)
            return metadata

        ck.dcp.save = save

    run = RunDir(root / "usr1")
    conf = dict(LONG, checkpoint_steps=0)

    def asked(sign, then):
        seen = len(losses(run.read_metrics()))
        ps = start(run, recipe_of(run, resume="latest", **conf), slow)

        def until(what):
            while not what():
                time.sleep(0.02)
                assert ps[0].is_alive(), log(run)

        until(lambda: len(losses(run.read_metrics())) >= seen + 3)
        os.kill(ps[0].pid, sign)
        until(lambda: any(run.checkpoints.glob(".step_*")))
        for s in then:
            os.kill(ps[0].pid, s)
            time.sleep(0.1)
        return wait(ps)

    assert asked(signal.SIGUSR1, [signal.SIGTERM, signal.SIGTERM]) == [0], log(run)
    good = [p.name for p in cf.complete_checkpoints(run)]
    assert len(good) == 1 and "stopped on request" in log(run)
    assert asked(signal.SIGTERM, [signal.SIGKILL]) == [-signal.SIGKILL]
    assert [p.name for p in run.checkpoints.glob("step_*")] == good and not cf.checkpoint_fault(
        run.checkpoints / good[0]
    )
    m = train(run, **dict(conf, resume="latest"))
    assert set(losses(m)) == set(range(1, 21)) and deviation(m, reference) <= 1e-5


def test_a_stalled_rank_is_named(root):
    def sleepy(rank, run):
        if rank == 1:
            real = trainer.train_step
            trainer.train_step = lambda run, step, b: (
                time.sleep(3600) if step == 4 else real(run, step, b)
            )

    run = RunDir(root / "stalled")
    recipe = recipe_of(run, stall_seconds=10, num_processes=2, **BASE, **ENGINES["ddp"])
    codes = wait(start(run, recipe, sleepy))
    text = log(run)
    assert 17 in codes, text[-2000:]
    assert "Where each rank is" in text and "first to fall silent" in text, text[-2000:]


def test_a_failing_rank_ends_all_with_its_traceback(root):
    def broken(rank, run):
        if rank == 1:
            real = trainer.train_step

            def step(run, s, b):
                if s == 3:
                    raise ZeroDivisionError("rank one broke here")
                return real(run, s, b)

            trainer.train_step = step

    run = RunDir(root / "broken")
    codes = wait(start(run, recipe_of(run, num_processes=2, **BASE, **ENGINES["fsdp"]), broken))
    assert codes[1] == 1 and codes[0] != 0
    assert "rank one broke here" in (run.path / "log_1.txt").read_text()


def test_a_disk_that_fills_keeps_the_last_checkpoint(root, reference):
    def full(rank, run):
        real = ck.dcp.save
        calls = []

        def save(*a, **k):
            calls.append(1)
            if len(calls) == 2:
                k["storage_writer"].path.joinpath("__0_0.distcp").write_bytes(b"half")
                raise OSError(28, "No space left on device")
            return real(*a, **k)

        ck.dcp.save = save

    run = RunDir(root / "full")
    codes = wait(start(run, recipe_of(run, **BASE), full))
    assert codes == [2] and "No space left on device" in log(run) and "untouched" in log(run)
    assert [p.name for p in run.checkpoints.iterdir()] == [cf.checkpoint_name(HALF)]
    m = train(run, **dict(BASE, resume="latest"))
    assert deviation(m, reference) <= 1e-5


def test_another_recipe_does_not_resume(root, ran):
    _, source = ran("ddp", 2)
    run = RunDir(root / "other")
    checkpoint = str(source / "checkpoints" / cf.checkpoint_name(HALF))
    codes = wait(start(run, recipe_of(run, resume=checkpoint, **dict(BASE, seed=5))))
    assert codes == [2] and "seed: 0 in the checkpoint, 5 now" in log(run)


@pytest.mark.parametrize("planned,given,used", [(False, "auto", False), (False, True, True)])
def test_the_plan_decides_whether_parameters_stay_gathered(root, reference, planned, given, used):
    def look(rank, run):
        import torch.distributed.fsdp as fsdp

        real = fsdp.fully_shard

        def shard(m, **k):
            if "reshard_after_forward" in k:
                (run.path / f"reshard_{rank}").write_text(str(k["reshard_after_forward"]))
            return real(m, **k)

        fsdp.fully_shard = shard
        trainer.peak_flops = lambda device: 1e12  # as of a GPU, for which MFU is written

    run = RunDir(root / f"gathered-{planned}-{given}")
    run.path.mkdir()
    fields = dict(BASE, steps=5, checkpoint_steps=0, strategy="fsdp", reshard=given)
    recipe = recipe_of(run, num_processes=2, **fields)
    run.plan.write_text(json.dumps(dict(reshard=planned)))
    assert wait(start(run, recipe, look)) == [0, 0], log(run)
    assert (
        f"fsdp_reshard_after_forward: {str(used).lower()}" in run.accelerate.read_text()
        and {(run.path / f"reshard_{r}").read_text() for r in (0, 1)} == {str(used)}
        and deviation(run.read_metrics(), reference) <= 1e-5
    )
    assert all(row["mfu"] > 0 for row in run.read_metrics() if "loss" in row)
