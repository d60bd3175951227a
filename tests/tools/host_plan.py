"""Host memory of whole runs on a CPU, planned against measured.

    python tests/tools/host_plan.py [--gib 0.5] [--heads 12] [--out host_plan.md] [NAME ...]

Each run is launched as the launch notebook does it, with the Qwen-Image stand-in of real width
blocks (tests/tools/host_memory.py), trains three steps and writes a checkpoint after the second.
"""

import argparse
import datetime
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from host_memory import GIB, wide_pipeline

from sciftune.core.plan import Plan
from sciftune.core.recipe import resolve
from sciftune.lab.jobs import LaunchFile
from sciftune.lab.prepare import prepare_run

RUNS = {
    "single": dict(strategy="single"),
    "single, in place": dict(strategy="single", host_memory_gib=1.0),  # no room for a copy
    "single, average": dict(strategy="single", ema_decay=0.9),
    "ddp x2": dict(strategy="ddp", num_processes=2),
    "fsdp x2": dict(strategy="fsdp", num_processes=2),
    "fsdp x2, in place": dict(strategy="fsdp", num_processes=2, host_memory_gib=1.0),
    "zero2+optimizer x2": dict(strategy="zero2", num_processes=2, offload="optimizer"),
    "zero3 x2": dict(strategy="zero3", num_processes=2),
    "zero3+optimizer x2": dict(strategy="zero3", num_processes=2, offload="optimizer"),
}
HEAD = """# Host memory: planned and measured

Whole runs on a CPU (fp32 weights of {size:.2f} GiB, three steps, a checkpoint after the second, \
torch {torch}, {date}). Measured is `host_memory_gib` of the metrics: the anonymous and shared \
memory of all ranks at its most, shared pages counted once. Regenerate with \
`python tests/tools/host_plan.py --gib {gib} --out docs/generated/host_plan.md`.

| run | planned GiB | measured GiB | planned / measured |
|---|---|---|---|
"""


def measured_run(root, folder, name, fields):
    "Planned and measured GiB of a run."
    recipe = resolve(
        **dict(model="qwenimage", model_path=str(folder), run_root=str(root), cpu=True)
        | dict(steps=3, checkpoint_steps=2, micro_batch=1, global_batch=2, figures=16, held_out=0)
        | dict(validation_steps=0, export=False, resolution=64, text_tokens=32, plan_check=False)
        | dict(name=name.replace(" ", "-").replace(",", ""), stall_seconds=1200)
        | fields
    )
    run = prepare_run(recipe)
    file = LaunchFile.load(run)
    done = subprocess.run(
        file.command,
        env={**os.environ, **file.environment},
        cwd=run.path,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    rows = run.read_metrics()
    measured = max(row["host_memory_gib"] for row in rows if "host_memory_gib" in row)
    return Plan.load(run.plan).run, measured


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--heads", type=int, default=12, help="width of a block, in 128 numbers")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as d:
        folder, size = wide_pipeline(Path(d) / "wide", arguments.gib, arguments.heads)
        head = HEAD.format(
            size=size / GIB,
            torch=torch.__version__,
            date=datetime.date.today(),
            gib=arguments.gib,
        )
        for name in arguments.names or RUNS:
            row, measured = measured_run(Path(d), folder, name, RUNS[name])
            planned = row.host_gib
            cells = f"{planned:.2f} | {measured:.2f} | {planned / measured:.2f}"
            lines.append(f"| {name} | {cells} |\n")
            print(lines[-1], row.host_parts_gib, row.gpu_gib, flush=True)
            subprocess.run(["rm", "-rf", str(Path(d) / name.replace(" ", "-").replace(",", ""))])
    if arguments.out:
        Path(arguments.out).write_text(head + "".join(lines))


if __name__ == "__main__":
    main()
