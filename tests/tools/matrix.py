"""Regenerate docs/generated/equality.md: every engine and world size against `single`, and every checkpoint resumed by every engine.

python tests/tools/matrix.py [--quick] [--out docs/generated/equality.md]
"""

import argparse
import datetime
import tempfile
from pathlib import Path

import accelerate
import deepspeed
import diffusers
import torch
from forked import ENGINES, deviation, losses, train

from sciftune.core.checkpoint_folders import complete_checkpoints
from sciftune.core.rundir import RunDir
from sciftune.training.checkpoints import CheckpointTensors

BASE = dict(
    model="qwenimage",
    figures=64,
    held_out=8,
    micro_batch=2,
    validation_steps=0,
    checkpoint_steps=10,
    lr_schedule="constant",
    export=False,
    ema_decay=0.9,
)
CELLS = [
    ("single", 1),
    ("ddp", 2),
    ("ddp", 4),
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 4),
    ("fsdp-noreshard", 2),
    ("fsdp-hybrid", 4),
    ("fsdp-offload", 2),
    ("zero1", 2),
    ("zero1", 4),
    ("zero2", 1),
    ("zero2", 2),
    ("zero2", 4),
    ("zero3", 1),
    ("zero3", 2),
    ("zero3", 4),
    ("zero1-offload", 2),
    ("zero2-offload", 2),
    ("zero3-offload", 2),
    ("zero3-params", 2),
]
RESUME = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp", 2),
    ("fsdp", 4),
    ("fsdp-hybrid", 4),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("zero3", 4),
]


def weights(run, state="weight"):
    t = CheckpointTensors(complete_checkpoints(run)[-1], "denoiser", state)
    return torch.cat([t[k] for k in sorted(t.keys())])


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--quick", action="store_true")
    a.add_argument("--out", default=None)
    a = a.parse_args()
    cells = [c for c in CELLS if c[1] < 4 and "-" not in c[0]] if a.quick else CELLS
    pairs = RESUME[:1] + [c for c in RESUME[1:] if c[1] == 2] if a.quick else RESUME
    with tempfile.TemporaryDirectory() as d:
        root = Path(d)
        ref = train(RunDir(root / "single-1"), steps=20, **BASE)
        w = weights(RunDir(root / "single-1"))
        made = {("single", 1)}
        lines = []
        lines += [
            "| engine | processes | first 20 losses | gradient norms | final weights |",
            "|---|---|---|---|---|",
        ]
        for e, n in cells:
            run = RunDir(root / f"{e}-{n}")
            m = (
                ref
                if (e, n) in made
                else train(run, steps=20, num_processes=n, **BASE, **ENGINES[e])
            )
            made.add((e, n))
            dw = ((weights(run) - w).norm() / w.norm()).item()
            lines.append(
                f"| {e} | {n} | {deviation(m, ref):.1e} | {deviation(m, ref, 'grad_norm'):.1e} | {dw:.1e} |"
            )
            print(lines[-1], flush=True)
            assert deviation(m, ref) <= 1e-5, (e, n)
        lines += [
            "",
            "| written by \\ resumed by | " + " | ".join(f"{e} ×{n}" for e, n in pairs) + " |",
            "|---|" + "---|" * len(pairs),
        ]
        for e, n in pairs:
            row = []
            for e2, n2 in pairs:
                run = RunDir(root / f"from-{e}-{n}-{e2}-{n2}")
                m = train(
                    run,
                    steps=20,
                    num_processes=n2,
                    resume=str(root / f"{e}-{n}" / "checkpoints" / "step_000010"),
                    **BASE,
                    **ENGINES[e2],
                )
                assert min(losses(m)) == 11
                row.append(
                    max(
                        deviation(m, ref),
                        (
                            (weights(run, "ema") - weights(RunDir(root / "single-1"), "ema")).norm()
                            / w.norm()
                        ).item(),
                    )
                )
            lines.append(f"| {e} ×{n} | " + " | ".join(f"{x:.1e}" for x in row) + " |")
            print(lines[-1], flush=True)
            assert max(row) <= 1e-5, (e, n)
    if a.out:
        Path(a.out).write_text(
            HEAD.format(
                date=datetime.date.today(),
                v=f"torch {torch.__version__}, accelerate {accelerate.__version__}, deepspeed {deepspeed.__version__}, diffusers {diffusers.__version__}",
            )
            + "\n".join(lines)
            + "\n"
        )


HEAD = """# Equality of the engines

Largest relative deviation from `single` at fp32, tiny Qwen-Image, global batch 8, gradient clipping and EMA on, gloo on CPU ({v}; {date}).
Regenerate with `python tests/tools/matrix.py --out docs/generated/equality.md`.

The second table: 10 steps with one engine, resumed for 10 more by another, against 20 uninterrupted steps; the larger of the losses' and the
moving average's deviation.

Not in the tables: zero3 with `offload='nvme'`, which needs libaio. `python -m pytest tests/processes/test_engines.py -m slow -k on_a_disk` runs it; on 2026-11-22 its losses deviated by 1.4e-07 on one process and 7.2e-08 on two,
and by 1.4e-07 and 7.2e-08 when resumed by `single`, and from `single` on two.

"""
if __name__ == "__main__":
    main()
