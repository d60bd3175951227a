"""Blocks of every family at real width on a GPU, and the kernels they are made of, each in a process of its own: python tests/gpu/blocks.py [--tiny] [CASE...]
Gradients must be finite and near those of fp32 arithmetic. When one is not: compute-sanitizer python tests/gpu/blocks.py --here CASE names the kernel. --tiny: small, on a CPU."""

import argparse
import itertools
import subprocess
import sys
import time
import traceback

import torch
import torch.nn.functional as F

from sciftune.core.recipe import resolve
from sciftune.lab.baseline import one_batch
from sciftune.models.family import get_family
from sciftune.objectives.flow.loss import FlowMatching
from sciftune.strategies.compilation import prepare_denoiser
from sciftune.strategies.lora import add_lora

ap = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
ap.add_argument("cases", nargs="*")
ap.add_argument("--tiny", action="store_true")
ap.add_argument("--here", action="store_true", help="no processes: one case, for a debugger")
args = ap.parse_args()
DEVICE = "cpu" if args.tiny else "cuda"
TYPE, NEAR = torch.bfloat16, 0.05
ROWS, HEADS, SIDE, TEXT = (48, 2, 128, 32) if args.tiny else (4608, 24, 1024, 512)


def far(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def judge(pairs):
    "The largest distance; raises for a tensor that is not finite or not near."
    bad = [n for n, a, b in pairs if not a.isfinite().all()]
    assert not bad, f"{len(bad)} of {len(pairs)} are not finite, first {bad[:3]}"
    worst = max((far(a, b), n) for n, a, b in pairs)
    assert worst[0] < NEAR, worst
    return f"{worst[0]:.1e} ({worst[1]})"


def gradients(f, *inputs):
    out = f(*inputs)
    g = torch.Generator(DEVICE).manual_seed(1)
    return [
        out,
        *torch.autograd.grad(
            out,
            [t for t in inputs if t.requires_grad],
            torch.randn(out.shape, device=DEVICE, generator=g).to(out.dtype),
        ),
    ]


def both(f, *inputs):
    "Results and gradients of `f` in the low type and in fp32."
    wide = [t.detach().float().requires_grad_(t.requires_grad) for t in inputs]
    return [
        (f"tensor {i}", a, b)
        for i, (a, b) in enumerate(zip(gradients(f, *inputs), gradients(f, *wide), strict=False))
    ]


SEEDS = itertools.count()


def draw(*shape, grad=True):
    return (
        torch.randn(
            shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(next(SEEDS))
        )
        .to(TYPE)
        .requires_grad_(grad)
    )


def matrices():
    "The products of a stream of text, of both streams and of an adapter."
    return "; ".join(
        f"{m}x{k}x{n} {judge(both(lambda x, w: x @ w.t(), draw(m, k), draw(n, k)))}"
        for m, k, n in (
            [(8, 16, 4)]
            if args.tiny
            else [(r, 3072, n) for r in (1, 512, 4096, 4608) for n in (16, 3072, 18432)]
            + [(r, 12288, n) for r in (512, 4096) for n in (16, 3072)]
            + [(512, 16, 3072), (4096, 16, 12288)]
        )
    )


def norms():
    "RMSNorm of queries and keys, its scale trained and frozen; ten times, since a race does not always show."
    return "; ".join(
        f"{rows}x{heads}{' frozen' if not train else ''} {judge([t for _ in range(10) for t in both(lambda x, w: F.rms_norm(x, (128,), w, 1e-6), draw(1, rows, heads, 128), draw(128, grad=train))])}"
        for rows in ((16,) if args.tiny else (512, 4096, 4608))
        for heads in ((2,) if args.tiny else (24, 32))
        for train in (True, False)
    )


def attention():
    "Attention as SDPA chooses it, and each of its backends that is there, ten times."
    from torch.nn.attention import SDPBackend as B
    from torch.nn.attention import sdpa_kernel

    q, k, v = (draw(1, ROWS, HEADS, 128) for _ in range(3))

    def run(q, k, v):
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2)

    said = []
    with sdpa_kernel(B.MATH):
        exact = gradients(run, *[t.detach().float().requires_grad_() for t in (q, k, v)])
    for name, kinds in dict(
        chosen=None, cudnn=[B.CUDNN_ATTENTION], flash=[B.FLASH_ATTENTION]
    ).items():
        try:
            for _ in range(10):
                if kinds:
                    with sdpa_kernel(kinds):
                        got = gradients(run, q, k, v)
                else:
                    got = gradients(run, q, k, v)
                one = judge(
                    [
                        (f"{name} {i}", a, b)
                        for i, (a, b) in enumerate(zip(got, exact, strict=False))
                    ]
                )
            said.append(f"{name} {one}")
        except RuntimeError as e:
            if not any(w in str(e) for w in ("No available kernel", "No viable backend")):
                raise
            said.append(f"{name} not here")
    return "; ".join(said)


def block_gradients(model, lora, compiled, width, kind):
    "Loss and gradients of a network of a few blocks, computed in `kind`, from the same weights and batch."
    low = kind is TYPE
    family = get_family(model)
    r = resolve(
        model=model,
        model_path="random",
        preset="debug",
        lora_rank=16 * lora,
        precision="fp32" if not low else "bf16-mixed" if lora else "bf16",
        resolution=SIDE,
        text_tokens=TEXT,
        compile=compiled and low,
        gradient_checkpointing="none",
        micro_batch=1,
        global_batch=1,
        plan_check=False,
        cpu=args.tiny,
        run_root="/tmp/gpu_blocks",
    )
    net = family.random_denoiser(dict(family.config(None), **width), TYPE, DEVICE)
    dead = set(family.frozen_parameters(net))
    for n, p in net.named_parameters():
        p.data = p.data.to(kind)
        p.requires_grad_(n not in dead)
    if lora:
        add_lora(net, family, r)
    prepare_denoiser(net, r)
    batch = one_batch(r, family, dict(net.config), torch.device(DEVICE))
    for _ in range(5 if low else 1):
        net.zero_grad()
        loss = FlowMatching(r, family).per_sample(net, batch).mean()
        loss.backward()
    return loss.item(), {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def blocks(*case):
    "Two blocks of each kind."
    loss, low = block_gradients(*case, TYPE)
    bad = [n for n, g in low.items() if not g.isfinite().all()]
    assert not bad, f"{len(bad)} of {len(low)} gradients are not finite: {bad[:4]}"
    wide = block_gradients(*case, torch.float32)[1]

    def total(d):
        return torch.cat([g.double().flatten().cpu() for g in d.values()])

    distance = far(total(low), total(wide))
    assert distance < 0.1, distance
    return f"loss {loss:.4f}, all gradients together {distance:.1e} from fp32"


TWO = dict(
    flux1=dict(num_layers=2, num_single_layers=2),
    klein=dict(num_layers=2, num_single_layers=2),
    qwenimage=dict(num_layers=2),
)
if args.tiny:
    TWO = {
        k: v
        | dict(attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32)
        | dict(
            flux1=dict(pooled_projection_dim=32, axes_dims_rope=(4, 6, 6)),
            klein=dict(axes_dims_rope=(4, 4, 4, 4)),
            qwenimage=dict(axes_dims_rope=(4, 6, 6)),
        )[k]
        for k, v in TWO.items()
    }
CASES = dict(norms=norms, attention=attention, matrices=matrices) | {
    f"{m}{'-lora' if lora else ''}{'-compiled' if comp else ''}": (
        lambda m=m, lora=lora, comp=comp: blocks(m, lora, comp, TWO[m])
    )
    for m in TWO
    for lora in (False, True)
    for comp in (False, True)
    if not (comp and args.tiny)
}


def child(name):
    began = time.time()
    try:
        print(f"ok    {name} ({time.time() - began:.0f} s) {CASES[name]()}", flush=True)
    except Exception as e:
        print(
            f"FAIL  {name} ({time.time() - began:.0f} s) {type(e).__name__}: {str(e)[:600]}",
            flush=True,
        )
        traceback.print_exc(limit=-4)
        sys.exit(1)


if wrong := [c for c in args.cases if c not in CASES]:
    sys.exit(f"no case {wrong}; known: {', '.join(CASES)}")
if args.here:
    child(args.cases[0])
    sys.exit()
failed = []
for name in args.cases or CASES:  # a process for each: a broken CUDA context ends with it
    try:
        code = subprocess.run(
            [sys.executable, __file__, "--here", name, *["--tiny"] * args.tiny], timeout=180
        ).returncode
    except subprocess.TimeoutExpired:
        code = 1
        print(f"FAIL  {name}: not over after 180 s", flush=True)
    if code:
        failed.append(name)
sys.exit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)
