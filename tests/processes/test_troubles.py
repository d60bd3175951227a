"""Troubles that are really produced, and what the table says about them."""

import datetime
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forked import PATIENCE, log, recipe_of, start, train, wait

from sciftune.core.diagnosis import Case, known_failures, recognise
from sciftune.core.rundir import RunDir
from sciftune.training import trainer

BASE = dict(
    model="qwenimage",
    figures=24,
    held_out=4,
    micro_batch=2,
    global_batch=4,
    validation_steps=0,
    checkpoint_steps=0,
    steps=4,
    lr_schedule="constant",
    export=False,
)


def names(text, code=1, **kw):
    return [f.name for f in recognise(Case(str(text), code, **kw))]


def _fail(work, path):
    try:
        work()
    except BaseException as e:
        Path(path).write_text(f"{type(e).__name__}: {e}")
    os._exit(0)


def message(work, tmp_path):
    """What `work` fails with, in a process of its own.

    The threads of process groups do not survive a later fork.
    """
    p = mp.get_context("fork").Process(target=_fail, args=(work, tmp_path / "said"))
    p.start()
    wait([p])
    return (tmp_path / "said").read_text()


def mismatch():
    from deepspeed.ops.op_builder import builder

    builder.installed_cuda_version, torch.version.cuda = (lambda name="": (11, 8)), "12.8"
    builder.assert_no_cuda_mismatch()


def deepspeed_batches():
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(
        dict(train_batch_size=8, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=2)
    )


def unused():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    net = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    net.forward = lambda x: net[0](x)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    for _ in range(2):
        ddp(torch.ones(1, 1)).sum().backward()


def taken_port():
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        dist.TCPStore("127.0.0.1", s.getsockname()[1], 1, is_master=True, use_libuv=True)


def bfloat(*shape):
    return torch.ones(*shape, dtype=torch.bfloat16)


REAL = {
    "weights used outside the engine": lambda: torch.nn.functional.embedding(
        torch.tensor([0]), torch.empty(0)
    ),
    "types do not match": lambda: torch.nn.functional.linear(torch.ones(2, 2), bfloat(2, 2)),
    "types do not match ": lambda: torch.nn.functional.conv2d(
        bfloat(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
    ),
    "types do not match  ": lambda: setattr(torch.nn.Parameter(bfloat(2)), "grad", torch.ones(2)),
    "types do not match   ": lambda: torch.zeros(3, dtype=torch.bfloat16).index_put_(
        (torch.tensor([0]),), torch.ones(1)
    ),
    "host out of memory": lambda: torch.empty(2**50, dtype=torch.uint8),
    "disk full": lambda: Path("/dev/full").write_bytes(b"x" * 9999),
    "CUDA mismatch": mismatch,
    "micro-batch unknown to DeepSpeed": deepspeed_batches,
    "parameters without gradient": unused,
    "port in use": taken_port,
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_message_is_recognised(tmp_path, name):
    text = message(REAL[name], tmp_path)
    assert names(text)[0] == name.strip(), text
    found = recognise(Case(text, 1))[0]
    assert found.cause and found.cure
    if name == "CUDA mismatch":
        assert (
            "11.8" in found.cause and "12.8" in found.cause and "DS_SKIP_CUDA_CHECK=1" in found.cure
        )


def test_messages_of_installed_packages():
    "What cannot happen without a GPU is looked up in the source that would say it."
    import accelerate.accelerator as a
    import accelerate.utils.fsdp_utils as f

    text = Path(a.__file__).read_text()
    said = re.search(r'"(At least one of the dataloaders passed to[\s\S]*?)\n\s*\)', text)[1]
    assert names(said)[0] == "micro-batch unknown to DeepSpeed"
    entry = next(e for e in known_failures() if e.name == "accelerate upcasts parameters")
    assert (
        re.search(entry.pattern, text + Path(f.__file__).read_text())
        and names("Upcasted low precision parameters in Linear because mixed precision turned on")
        == []
    )


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "GPU out of memory",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. "
            "GPU 0 has a total capacity of 79.15 GiB of which 17.12 MiB is free.",
        ),
        (
            "GPU out of memory",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED "
            "when calling `cublasCreate(handle)`",
        ),
        (
            "a rank stalled",
            "[Rank 0] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) "
            "ran for 600029 milliseconds before timing out.",
        ),
        (
            "machines do not find each other",
            "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms "
            "while trying to connect to (10.0.0.1, 29500).",
        ),
        (
            "8-bit optimizer under sharding",
            "NotImplementedError: Operator bitsandbytes.optimizer_update_8bit_blockwise.default "
            "does not have a sharding strategy registered.",
        ),
        (
            "CUDA mismatch",
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        ),
    ],
)
def test_messages_of_gpus(name, text):
    assert names(text)[0] == name


def _talk(rank, port, silent, path):
    "Rank 0 waits for a sum, a second where rank 1 is silent; rank 1 is silent or dies."
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    dist.barrier()
    if rank == 1:
        if silent:
            time.sleep(2 * PATIENCE)  # the test ends it
        os.kill(os.getpid(), signal.SIGKILL)
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=1 if silent else PATIENCE)
    try:
        dist.group.WORLD.allreduce([torch.ones(1)], options).wait()
    except RuntimeError as e:
        path.write_text(str(e))
    os._exit(1)


@pytest.mark.parametrize("silent, name", [(False, "peer lost"), (True, "a rank stalled")])
def test_what_the_other_rank_says(tmp_path, silent, name):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context, said = mp.get_context("fork"), tmp_path / "said"
    ps = [context.Process(target=_talk, args=(r, port, silent, said)) for r in range(2)]
    for p in ps:
        p.start()
    wait(ps[:1])
    wait(ps)  # as rank 0 has failed, this ends rank 1
    text = said.read_text()
    assert names(text)[0] == name, text
    assert names(text + "\nOSError: [Errno 28] No space left on device")[0] != "peer lost"


def test_a_process_killed_without_a_word(tmp_path):
    assert names("step 3/10", 137) == names("", -9) == ["host out of memory"]
    # as accelerate's launcher of one process says it
    text = message(lambda: subprocess.run(["sh", "-c", "kill -9 $$"], check=True), tmp_path)
    assert names(text)[0] == "host out of memory", text


@pytest.mark.slow
def test_a_killed_rank_of_the_launcher():
    "torchrun's own words for a rank that the kernel killed."
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "1",
        "--no-python",
        sys.executable,
        "-S",
        "-c",
        "import os; os.kill(os.getpid(), 9)",
    ]
    r = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert r.returncode == 1 and names(r.stderr, r.returncode)[0] == "host out of memory", r.stderr


def test_failures_of_runs(tmp_path):
    "A loss or a gradient that is no number, a failing validation, a resume from nowhere."

    def failed(name, sabotage=None, **fields):
        run = RunDir(tmp_path / name)
        recipe = recipe_of(run, **BASE | fields)
        codes = wait(start(run, recipe, sabotage))
        text = log(run)
        assert any(codes), text
        return names(text, next(c for c in codes if c), recipe=recipe), text

    def nan(rank, run):
        real = trainer.train_step
        trainer.train_step = lambda run, step, b: (
            real(run, step, b) | dict(loss=torch.tensor(float("nan")))
        )

    def steep(rank, run):
        real = trainer.train_step
        trainer.train_step = lambda run, step, b: (
            real(run, step, b) | dict(grad_norm=torch.tensor(float("nan")))
        )

    def blind(rank, run):
        from sciftune.objectives.common import task as tasks

        def held_out_loss(*a):
            raise IndexError("no such sigma")

        tasks.held_out_loss = held_out_loss

    assert failed("nan", nan)[0][0] == "loss is no number"
    assert failed("steep", steep)[0][0] == "gradient is no number"
    assert failed("blind", blind, validation_steps=2)[0][0] == "validation error"
    assert (
        failed("other", resume=str(tmp_path / "nowhere"))[0][0] == "another run in the checkpoint"
    )


def test_troubles_while_running(tmp_path):
    """Updates that are rounded away: a line in the log and an event with cause and cure.

    Nothing in a healthy run.
    """
    run = RunDir(tmp_path / "rounded")
    m = train(run, **BASE | dict(precision="bf16", learning_rate=1e-6, steps=3))
    said = {r["name"]: r for r in m if r.get("event") == "trouble"}
    assert "bf16-master24" in said["updates rounded away"]["cure"]
    assert "warning: updates rounded away" in log(run)
    healthy = train(RunDir(tmp_path / "healthy"), **BASE | dict(steps=3))
    assert not [r for r in healthy if r.get("event") == "trouble"]
