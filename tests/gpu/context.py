"""Ranks that share the tokens of a sample, on GPUs: equality, attention kernels, klein at 4096 px.

    torchrun --standalone --nproc_per_node 2 tests/gpu/context.py [--tiny] [CASE...]

equal      one double and one single block of klein at real width, pictures and captions that the
           ranks do not divide: prediction and gradients, summed over ranks, against one GPU, in
           fp32 and in bf16
attention  forward and backward of attention at the tokens of SIDE x SIDE pixels, one line per
           kernel: seconds, TFLOP/s, whether gradients are finite, distance from the first
klein      the whole model at SIDE x SIDE pixels through the trainer, by `sciftune.project.bench`: a
           row like those of docs/bench.jsonl, and what was planned (rank 0 starts it by itself,
           so run this case without torchrun, with --gpus)

--tiny: small, over gloo on CPUs.
"""

import argparse
import json
import os
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import nn

from sciftune.core.recipe import resolve
from sciftune.models.family import get_family
from sciftune.models.tokens import stack_sizes
from sciftune.strategies import context
from sciftune.strategies.compilation import prepare_denoiser
from sciftune.strategies.engine import Engine

ap = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
ap.add_argument("cases", nargs="*", default=[])
ap.add_argument("--tiny", action="store_true")
ap.add_argument("--side", type=int, default=4096, help="pixels of attention and klein")
ap.add_argument("--gpus", type=int, default=2, help="of the case klein")
ap.add_argument("--steps", type=int, default=6, help="of the case klein")
args = ap.parse_args()
RANKS = int(os.environ.get("WORLD_SIZE", 1))
FAMILY = get_family("klein")
SMALL = dict(num_layers=1, num_single_layers=1)
BACKENDS = ("_native_cudnn", "_native_flash", "native")
REPEATS = 1 if args.tiny else 5


def far(a, b):
    "Distance relative to the length of `b`."
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def engine_of():
    shared = dict(strategy="ddp", num_processes=RANKS, context_parallel=RANKS)
    fields = dict(model="klein", micro_batch=2, global_batch=2, cpu=args.tiny)
    return Engine(resolve(**fields, **shared))


def blocks(engine, dtype):
    "Two blocks of klein with the same random weights on every rank."
    config = dict(FAMILY.real_config) | SMALL
    if args.tiny:
        config |= dict(attention_head_dim=16, num_attention_heads=4, axes_dims_rope=(4, 4, 4, 4))
    model = FAMILY.empty_denoiser(config).to_empty(device=engine.device).to(dtype)
    generator = torch.Generator(engine.device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            nn.init.ones_(parameter)
    return model


def batch(engine, config, masked):
    "Two pictures with text; if `masked`, unequal ones that the ranks do not divide."
    draw = torch.Generator().manual_seed(1)
    sizes = [(5, 3), (3, 7)] if args.tiny else [(63, 95), (85, 61)]
    sizes = sizes if masked else [(8, 4)] * 2 if args.tiny else [(64, 96)] * 2
    x = [torch.randn(FAMILY.latent_channels, *size, generator=draw) for size in sizes]
    text = [
        torch.randn(511 + (not masked), config.joint_attention_dim, generator=draw) for _ in sizes
    ]
    latents, sizes = stack_sizes(x)
    given = FAMILY.collate([dict(text=row.to(engine.device)) for row in text])
    sigma = torch.tensor([0.3, 0.8], device=engine.device)
    return latents.to(engine.device), sigma, given | (dict(sizes=sizes) if sizes else {})


def gradients(engine, dtype, shared, masked):
    "Prediction and gradients of one GPU, or of all ranks together."
    model = prepare_denoiser(blocks(engine, dtype), engine.recipe).train()
    if shared:
        context.share_tokens(model, FAMILY, engine.recipe, engine)
    made = FAMILY.predict(model, *batch(engine, model.config, masked))
    made.square().mean().backward()
    found = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    if shared:
        found = {n: engine.total(g) for n, g in found.items()}
    return made.detach().float(), found


def equal(engine):
    "Raises where all ranks together are not what one GPU is."
    for masked in (True, False):
        wanted = gradients(engine, torch.float32, False, masked)
        for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
            judge(
                f"equal {dtype}, masked {masked}",
                near,
                gradients(engine, dtype, True, masked),
                wanted,
            )


def judge(what, near, made, wanted):
    "Say how far prediction and gradients are; raises where they are not finite or not near."
    (prediction, found), (right, gradient) = made, wanted
    assert prediction.isfinite().all() and all(g.isfinite().all() for g in found.values())
    worst = max((far(found[n], g), n) for n, g in gradient.items() if g.any())
    say(f"{what}: prediction {far(prediction, right):.1e}, gradients {worst[0]:.1e} ({worst[1]})")
    assert far(prediction, right) < near and worst[0] < near


def timed(run):
    "Seconds of the fastest of some runs, and the last result."
    best = float("inf")
    for _ in range(REPEATS + 1):
        dist.barrier()
        if not args.tiny:
            torch.cuda.synchronize()
        began = time.perf_counter()
        made = run()
        if not args.tiny:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best, made


def attention(engine):
    "A line for each kernel that exchanges tokens for heads."
    side = 64 if args.tiny else args.side
    tokens = (side // 16) ** 2 + 512
    heads, width = (4, 16) if args.tiny else (32, 128)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    model = FAMILY.build_tiny().transformer
    mesh = context.context_mesh(engine)
    parallel = context.parallel_processors(model, mesh, engine.device)[0]._parallel_config
    generator = torch.Generator(engine.device).manual_seed(dist.get_rank())
    shape = (1, tokens // RANKS, heads, width)
    drawn = [torch.randn(shape, generator=generator, device=engine.device) for _ in range(4)]
    *qkv, arrived = (t.to(dtype) for t in drawn)
    operations = 3.5 * 4 * tokens**2 * heads * width / RANKS
    first = None
    for name in BACKENDS[2:] if args.tiny else BACKENDS:

        def both_ways(name=name):
            inputs = [t.clone().requires_grad_() for t in qkv]
            backend = AttentionBackendName(name)
            out = dispatch_attention_fn(*inputs, backend=backend, parallel_config=parallel)
            return [out.detach(), *torch.autograd.grad(out, inputs, arrived)]

        seconds, made = timed(both_ways)
        first = first or made
        finite = all(t.isfinite().all() for t in made)
        rate = operations / seconds / 1e12
        apart = max(far(a, b) for a, b in zip(made, first, strict=True))
        say(f"attention {name}: {tokens} tokens, {seconds:.4f} s, {rate:.0f} TFLOP/s per GPU, ")
        say(f"    finite {finite}, {apart:.1e} from {BACKENDS[0]}")


def klein():
    "The whole model through the trainer, by itself in processes of its own."
    from sciftune.project.bench import bench

    fields = dict(model="klein", precision="bf16-master24", micro_batch=1, global_batch=1)
    fields |= dict(strategy="fsdp", num_processes=args.gpus, context_parallel=args.gpus)
    fields |= dict(resolution=args.side, steps=args.steps, gradient_checkpointing="auto")
    if args.tiny:
        small = dict(model_path="tiny", resolution=64, text_tokens=32, figures=16, cpu=True)
        fields |= small | dict(precision="fp32", compile=False)
    with tempfile.TemporaryDirectory() as folder:
        row = bench(folder, label=f"klein-{fields['resolution']}-context{args.gpus}", **fields)
    print(json.dumps(row, indent=1, default=str))


warnings.filterwarnings("ignore")
asked = args.cases or ["equal", "attention"]
if unknown := set(asked) - {"equal", "attention", "klein"}:
    ap.error(f"no case {', '.join(sorted(unknown))}")
if "klein" in asked:
    klein()
else:
    running = engine_of()
    for case in asked:
        dict(equal=equal, attention=attention)[case](running)
    dist.barrier()
    os._exit(0)
