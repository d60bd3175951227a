"""Host memory while a model of several GB is loaded by two ranks: about one copy per node, however many ranks.

    python tests/tools/host_memory.py [--gib 2.5] [--out docs/generated/host_memory.md]

The denoiser is the Qwen-Image stand-in with real width blocks. On a CPU the weights that stay are in host memory, too: `kept` is what
a GPU would hold, `peak` - `kept` what loading costs beside it. Sums over both ranks, anonymous memory and mapped files apart: the pages of mapped files
are the page cache's, one copy for all ranks and given back when memory is short."""

import argparse
import ctypes
import datetime
import json
import shutil
import time
from pathlib import Path

import torch
from forked import log, start, wait

from sciftune.core.plan import Plan
from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.models import qwenimage
from sciftune.models.family import get_family
from sciftune.strategies.engine import Engine
from sciftune.strategies.zero import Zero3Network
from sciftune.training import task as tasks
from sciftune.training import trainer

GIB = 2**30


def wide_pipeline(folder, gib):
    "The stand-in with a denoiser of about `gib` GiB in fp32, written block by block; returns the folder and the bytes of its weights."
    from safetensors.torch import save_file

    family = get_family("qwenimage")
    folder = Path(family.tiny(folder))
    config = dict(
        qwenimage.QWEN_IMAGE,
        attention_head_dim=128,
        num_attention_heads=12,
        joint_attention_dim=32,
        axes_dims_rope=(16, 56, 56),
    )

    def sized(n):
        return (
            sum(p.numel() for p in family.empty_denoiser(dict(config, num_layers=n)).parameters())
            * 4
        )

    config["num_layers"] = max(1, round((gib * GIB - sized(0)) / (sized(1) - sized(0))))
    model = family.empty_denoiser(config)
    part = folder / "transformer"
    shutil.rmtree(part)
    part.mkdir()
    (part / "config.json").write_text(
        json.dumps(dict(config, _class_name="QwenImageTransformer2DModel"))
    )
    where, groups = {}, {}
    for n, p in model.named_parameters():
        groups.setdefault(
            ".".join(n.split(".")[:2]) if n.startswith("transformer_blocks") else "rest", []
        ).append((n, p.shape))
    for i, group in enumerate(groups.values()):
        file = f"diffusion_pytorch_model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        save_file({n: torch.full(s, (i + 1) / 64) for n, s in group}, part / file)
        where |= {n: file for n, _ in group}
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps(dict(metadata={}, weight_map=where))
    )
    return folder, sum(p.numel() for p in model.parameters()) * 4


def load_only(recipe, dir):
    "Instead of training: load when told to; stop where the weights are in place and where the engine is ready."
    e = Engine(recipe)
    family = get_family(recipe.model)

    def meet(name, then):
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # freed pieces of the C heap are not what is asked here
        (dir.path / f"{name}_{e.rank}").touch()
        while not (dir.path / then).exists():
            time.sleep(0.01)

    partition = Zero3Network.prepare_module

    def partitioned(net):
        partition(net)
        meet("loaded", "wrap")

    Zero3Network.prepare_module = partitioned  # DeepSpeed's own buffers come after it
    meet("started", "load")
    model = tasks.build_denoiser(recipe, family, recipe.model_path, e, Plan())
    if recipe.strategy == "ddp":
        meet("loaded", "wrap")
    net = e.network(
        model, "denoiser", tasks.parameter_source(recipe, family, recipe.model_path, e, model)
    )
    if recipe.strategy == "fsdp":
        meet("loaded", "wrap")
    (dir.path / f"sum_{e.rank}").write_text(
        str(sum(net.read(r, "weight").double().sum().item() for r in net.owned()))
    )
    meet("ready", "end")


def resident(pids):
    "(anonymous, file-backed) bytes of the processes, shared pages divided among those that share them."
    total = dict(Pss_Anon=0, Pss_File=0)
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if (key := line.split(":")[0]) in total:
                total[key] += int(line.split()[1]) * 1024
    return total["Pss_Anon"], total["Pss_File"]


def measure(root, folder, strategy, ranks=2):
    "Host memory of all ranks while `strategy` loads `folder`, above what they had before: bytes."
    run = RunDir(root / f"{strategy}-{ranks}")
    recipe = resolve(
        cpu=True,
        model="qwenimage",
        run_root=str(root),
        name=run.path.name,
        model_path=str(folder),
        strategy=strategy,
        num_processes=ranks,
        stall_seconds=600,
    )
    ps = start(run, recipe, lambda rank, run: setattr(trainer, "train", load_only))
    pids = [p.pid for p in ps]

    def samples(until):
        seen = []
        while not all((run.path / f"{until}_{r}").exists() for r in range(ranks)):
            assert all(p.is_alive() for p in ps), log(run)
            time.sleep(0.05)
            seen.append(resident(pids))
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

Two ranks load a denoiser of {size:.2f} GiB (fp32, {layers}) on a CPU over gloo; memory of both together above what they had before loading, in GiB
(torch {torch}; {date}). Regenerate with `python tests/tools/host_memory.py --gib {gib} --out docs/generated/host_memory.md`; `pytest -m slow tests/processes/test_host_memory.py` checks the bounds.

*Peak* is the most while the weights are read, *kept* what stays when they are in place (on a GPU in the GPU's memory), their difference what loading itself
costs a node. *Mapped files* are pages of the safetensors files in the page cache: one copy for all ranks, which the system takes back when memory is short.
*Engine ready* adds what the engine allocates for training: DDP its broadcast buffers, ZeRO-3 the fp32 copy, the gradient partitions and two
buckets of 200 million elements.

| engine | peak | kept | peak − kept | kept / model | mapped files | engine ready |
|---|---|---|---|---|---|---|
"""


def main():
    import tempfile

    a = argparse.ArgumentParser()
    a.add_argument("--gib", type=float, default=2.5)
    a.add_argument("--out")
    a = a.parse_args()
    with tempfile.TemporaryDirectory() as d:
        size, rows = measured(Path(d), a.gib)
    lines = [
        f"| {s} ×2 | {r['peak'] / GIB:.2f} | {r['kept'] / GIB:.2f} | {(r['peak'] - r['kept']) / GIB:.2f} | {r['kept'] / size:.2f} | {r['file'] / GIB:.2f} | {r['ready'] / GIB:.2f} |"
        for s, r in rows.items()
    ]
    text = (
        HEAD.format(
            size=size / GIB,
            layers="Qwen-Image blocks of half width",
            torch=torch.__version__,
            date=datetime.date.today(),
            gib=a.gib,
        )
        + "\n".join(lines)
        + "\n"
    )
    print(text)
    if a.out:
        Path(a.out).write_text(text)


if __name__ == "__main__":
    main()
