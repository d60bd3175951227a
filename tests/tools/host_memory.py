"""Host memory while a model of several GB is loaded: about one copy per node.

    python tests/tools/host_memory.py [--gib 2.5] [--out docs/generated/host_memory.md]

The denoiser is the Qwen-Image stand-in with real width blocks, loaded by two ranks. On a CPU the
weights that stay are in host memory, too: `kept` is what a GPU would hold, `peak` - `kept` what
loading costs beside it. Sums over both ranks, anonymous memory and mapped files apart: the pages
of mapped files are the page cache's, one copy for all ranks and given back when memory is short.
"""

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch
from forked import log, recipe_of, start, wait
from safetensors.torch import save_file

from sciftune.core.plan import Plan
from sciftune.core.rundir import RunDir
from sciftune.models import qwenimage
from sciftune.models.family import get_family
from sciftune.strategies.engine import Engine
from sciftune.strategies.zero import Zero3Module
from sciftune.training import task as tasks
from sciftune.training import trainer

GIB = 2**30


def count(model):
    "Bytes of its parameters in fp32."
    return sum(p.numel() for p in model.parameters()) * 4


def wide_denoiser(gib, heads=12):
    "Config and empty network of a denoiser of about `gib` GiB; 12 heads are half the real width."
    family = get_family("qwenimage")
    config = dict(
        qwenimage.QWEN_IMAGE,
        attention_head_dim=128,
        num_attention_heads=heads,
        joint_attention_dim=32,
        axes_dims_rope=(16, 56, 56),
    )
    none, one = (count(family.empty_denoiser(dict(config, num_layers=n))) for n in (0, 1))
    config["num_layers"] = max(1, round((gib * GIB - none) / (one - none)))
    return config, family.empty_denoiser(config)


def write_by_blocks(model, folder):
    "A file for each block, whose weights are all one number, and an index."
    groups, where = {}, {}
    for name, p in model.named_parameters():
        in_block = name.startswith("transformer_blocks")
        group = ".".join(name.split(".")[:2]) if in_block else "rest"
        groups.setdefault(group, []).append((name, p.shape))
    for i, group in enumerate(groups.values()):
        file = f"diffusion_pytorch_model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: torch.full(s, (i + 1) / 64) for name, s in group}, folder / file)
        where |= {name: file for name, _ in group}
    index = json.dumps(dict(metadata={}, weight_map=where))
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(index)


def wide_pipeline(folder, gib, heads=12):
    """The stand-in with a denoiser of about `gib` GiB in fp32, written block by block.

    Returns the folder and the bytes of the denoiser's weights.
    """
    folder = Path(get_family("qwenimage").tiny(folder))
    config, model = wide_denoiser(gib, heads)
    part = folder / "transformer"
    shutil.rmtree(part)
    part.mkdir()
    written = dict(config, _class_name="QwenImageTransformer2DModel")
    (part / "config.json").write_text(json.dumps(written))
    write_by_blocks(model, part)
    return folder, count(model)


def load_only(recipe, dir):
    """Instead of training: load when told to.

    Stops where the weights are in place and where the engine is ready.
    """
    e = Engine(recipe)
    family = get_family(recipe.model)

    def meet(name, then):
        # freed pieces of the C heap are not what is asked here
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        (dir.path / f"{name}_{e.rank}").touch()
        while not (dir.path / then).exists():
            time.sleep(0.01)

    partition = Zero3Module.prepare_module

    def partitioned(net):
        partition(net)
        meet("loaded", "wrap")

    Zero3Module.prepare_module = partitioned  # DeepSpeed's own buffers come after it
    meet("started", "load")
    model = tasks.build_denoiser(recipe, family, recipe.model_path, e, Plan())
    if recipe.strategy == "ddp":
        meet("loaded", "wrap")
    source = tasks.parameter_source(recipe, family, recipe.model_path, e, model)
    net = e.network(model, "denoiser", source)
    if recipe.strategy == "fsdp":
        meet("loaded", "wrap")
    total = sum(net.read(r, "weight").double().sum().item() for r in net.owned())
    (dir.path / f"sum_{e.rank}").write_text(str(total))
    meet("ready", "end")


def resident(pids):
    """(anonymous, file-backed) bytes of the processes.

    Shared pages are divided among those that share them. All stand still meanwhile: a page that
    one gives back and another maps between two readings would count twice.
    """
    total = dict(Pss_Anon=0, Pss_File=0)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if (key := line.split(":")[0]) in total:
                    total[key] += int(line.split()[1]) * 1024
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return total["Pss_Anon"], total["Pss_File"]


def measure(root, folder, strategy, ranks=2):
    "Host memory of all ranks while `strategy` loads `folder`, above what they had before: bytes."
    run = RunDir(root / f"{strategy}-{ranks}")
    recipe = recipe_of(
        run, model="qwenimage", model_path=str(folder), strategy=strategy, num_processes=ranks
    )
    ps = start(run, recipe, lambda rank, run: setattr(trainer, "train", load_only))
    pids = [p.pid for p in ps]

    def samples(until):
        seen, took = [], 0.0
        while not all((run.path / f"{until}_{r}").exists() for r in range(ranks)):
            assert all(p.is_alive() for p in ps), log(run)
            time.sleep(max(0.05, 2 * took))  # the ranks stand still a third of the time at most
            began = time.monotonic()
            seen.append(resident(pids))
            took = time.monotonic() - began
        return [*seen, resident(pids)]

    anon, file = samples("started")[-1]
    (run.path / "load").touch()
    loading = samples("loaded")
    (run.path / "wrap").touch()
    ready = samples("ready")[-1]
    (run.path / "end").touch()
    assert wait(ps) == [0] * ranks, log(run)
    block = max(p.stat().st_size for p in (folder / "transformer").glob("*.safetensors"))
    return dict(
        block=block,
        peak=max(a for a, _ in loading) - anon,
        kept=loading[-1][0] - anon,
        file=max(f for _, f in loading) - file,
        ready=ready[0] - anon,
        total=sum(float((run.path / f"sum_{r}").read_text()) for r in range(ranks)),
    )


def measured(root, gib, strategies=("ddp", "fsdp", "zero3")):
    folder, size = wide_pipeline(root / "wide", gib)
    return size, {s: measure(root, folder, s) for s in strategies}


HEAD = """# Host memory while loading

Two ranks load a denoiser of {size:.2f} GiB (fp32, {layers}) on a CPU over gloo; \
memory of both together above what they had before loading, in GiB
(torch {torch}; {date}). Regenerate with \
`python tests/tools/host_memory.py --gib {gib} --out docs/generated/host_memory.md`; \
`pytest -m slow tests/processes/test_host_memory.py` checks the bounds.

*Peak* is the most while the weights are read, *kept* what stays when they are in place \
(on a GPU in the GPU's memory), their difference what loading itself
costs a node. *Mapped files* are pages of the safetensors files in the page cache: \
one copy for all ranks, which the system takes back when memory is short.
*Engine ready* adds what the engine allocates for training: \
DDP its broadcast buffers, ZeRO-3 the fp32 copy, the gradient partitions and two
buckets of 200 million elements.

| engine | peak | kept | peak − kept | kept / model | mapped files | engine ready |
|---|---|---|---|---|---|---|
"""


def table_row(name, row, size):
    cells = [
        f"{row['peak'] / GIB:.2f}",
        f"{row['kept'] / GIB:.2f}",
        f"{(row['peak'] - row['kept']) / GIB:.2f}",
        f"{row['kept'] / size:.2f}",
        f"{row['file'] / GIB:.2f}",
        f"{row['ready'] / GIB:.2f}",
    ]
    return f"| {name} ×2 | {' | '.join(cells)} |\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as d:
        size, rows = measured(Path(d), arguments.gib)
    head = HEAD.format(
        size=size / GIB,
        layers="Qwen-Image blocks of half width",
        torch=torch.__version__,
        date=datetime.date.today(),
        gib=arguments.gib,
    )
    text = head + "".join(table_row(name, row, size) for name, row in rows.items())
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text)


if __name__ == "__main__":
    main()
