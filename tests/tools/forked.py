"""Train in forked gloo processes: everything is imported once, so that a case costs seconds.

On GPUs (`cpu=False`) ranks are fresh processes that use NCCL, since CUDA does not survive a fork.
"""

import contextlib
import gc
import importlib
import itertools
import logging
import os
import sys
import time
import warnings

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.multiprocessing as mp
from accelerate.state import AcceleratorState, GradientState
from additions import added
from PIL import Image
from shared_figures import share_figures
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from sciftune.core.recipe import resolve
from sciftune.lab.jobs import free_port
from sciftune.models.family import get_family
from sciftune.strategies.launch_files import write_configs
from sciftune.training import trainer
from sciftune.training.task import get_task

PATIENCE = 1800  # seconds for a run: so long that only one that hangs needs them
STALL = 1200  # seconds without a step, after which a rank says where it hangs and ends
ENGINES = {
    "single": dict(strategy="single"),
    "ddp": dict(strategy="ddp"),
    "fsdp": dict(strategy="fsdp"),
    "fsdp-noreshard": dict(strategy="fsdp", reshard=False),
    "fsdp-hybrid": dict(strategy="fsdp", hybrid_shard=2),
    "fsdp-offload": dict(strategy="fsdp", offload="params"),
    "zero1": dict(strategy="zero1"),
    "zero2": dict(strategy="zero2"),
    "zero3": dict(strategy="zero3"),
    "zero1-offload": dict(strategy="zero1", offload="optimizer"),
    "zero2-offload": dict(strategy="zero2", offload="optimizer"),
    "zero3-offload": dict(strategy="zero3", offload="optimizer"),
    "zero3-params": dict(strategy="zero3", offload="params"),
}


def _rank(rank, world, port, recipe, run, sabotage):
    gc.freeze()  # all that was imported: collections (`Family.unload`, ZeRO) leave it alone
    AcceleratorState._reset_state(True)  # a test before may have made an engine in this process
    GradientState._reset_state()
    if world > 1 or recipe.strategy not in ("single", "ddp"):
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    log = os.open(run.path / f"log_{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # pytest has put its own in their place
    sys.stdout = sys.stderr = os.fdopen(os.dup(log), "w", buffering=1)
    if sabotage:
        sabotage(rank, run)
    trainer.run_rank([str(run.recipe)])


USED_LATER = (  # by ranks, after they have started
    "pandas",
    "pyarrow.pandas_compat",
    "matplotlib.pyplot",
    "diffusers.pipelines.pipeline_utils",
    "diffusers.pipelines.onnx_utils",
    "diffusers.guiders",
    "numpy.ctypeslib",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.engine",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "setuptools",
    "deepspeed.runtime.zero.stage3",
)


def import_for(recipe):
    "What the ranks of `recipe` would import one by one is imported here, once for all runs."
    for name in (*USED_LATER, *itertools.chain(*added("USED_LATER"))):
        with contextlib.suppress(ImportError):  # deepspeed is an extra
            importlib.import_module(name)
    Image.init()
    get_checkpoint_conversion_mapping("qwen3")  # its patterns are compiled once, for all models
    get_family(recipe.model)
    get_task(recipe.objective)


def start(run, recipe, sabotage=None):
    "Write the run's files and fork its ranks; returns the processes."
    import_for(recipe)
    share_figures(recipe.run_root)
    run.path.mkdir(parents=True, exist_ok=True)
    write_configs(recipe, run)
    port = free_port()
    ctx = mp.get_context("fork" if recipe.cpu else "spawn")
    world = max(recipe.num_processes, 1)
    ps = [
        ctx.Process(target=_rank, args=(r, world, port, recipe, run, sabotage))
        for r in range(world)
    ]
    for p in ps:
        p.start()
    return ps


def fork(work, world):
    "Fork ranks that call `work`, as torchrun would start them; returns the processes."
    port = free_port()

    def rank(number):
        torch.set_num_threads(torch.get_num_threads())  # before two threads want a pool
        gc.freeze()
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        work()

    ps = [mp.get_context("fork").Process(target=rank, args=(number,)) for number in range(world)]
    for p in ps:
        p.start()
    return ps


def log(run):
    return "\n".join(p.read_text() for p in sorted(run.path.glob("log_*.txt")))


def wait(ps, seconds=PATIENCE):
    "Exit codes; as a launcher would, ends all when one fails."
    end = time.time() + seconds
    while any(p.is_alive() for p in ps) and time.time() < end and not any(p.exitcode for p in ps):
        time.sleep(0.05)
    for p in ps:
        if any(q.exitcode for q in ps) or time.time() >= end:
            p.kill()
        p.join()
    return [p.exitcode for p in ps]


def recipe_of(run, **fields):
    "The recipe of a run that is kept in `run`; on the CPU where `cpu` is not said."
    folder = dict(run_root=str(run.path.parent), name=run.path.name)
    return resolve(**dict(cpu=True, stall_seconds=STALL) | folder | fields)


def train(run, patience=PATIENCE, **fields):
    "Train to the end; returns the metrics. Raises with the log when a rank fails."
    codes = wait(start(run, recipe_of(run, **fields)), patience)
    if any(codes):
        ends = [p.read_text()[-3000:] for p in sorted(run.path.glob("log_*.txt"))]
        raise RuntimeError("\n".join([f"{run.path.name}: exit codes {codes}", *ends]))
    return run.read_metrics()


def losses(metrics, key="loss"):
    return {m["step"]: m[key] for m in metrics if key in m}


def deviation(a, b, key="loss"):
    "Largest relative deviation over the steps that both have."
    a, b = losses(a, key), losses(b, key)
    common = a.keys() & b.keys()
    assert common, "no common step"
    return max(abs(a[s] - b[s]) / abs(b[s]) for s in common)
