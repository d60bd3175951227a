"""Blocks of every family at real width on a GPU, and the kernels they are made of.

    python tests/gpu/blocks.py [--tiny] [CASE...]

Each case is a process of its own. Gradients must be finite and near those of fp32 arithmetic; when
one is not, `compute-sanitizer python tests/gpu/blocks.py --here CASE` names the kernel.
--tiny: small, on a CPU.
"""

import argparse
import itertools
import subprocess
import sys
import time
import traceback
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sciftune.core.recipe import resolve
from sciftune.models.family import get_family
from sciftune.models.packing import Packing, join_rows, packed_attention
from sciftune.models.references import stack_references
from sciftune.objectives.flow.loss import FlowMatching
from sciftune.project.baseline import one_batch
from sciftune.strategies.adapters.layers import add_lora
from sciftune.strategies.compilation import prepare_denoiser
from sciftune.training.validation import to_device

ap = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
ap.add_argument("cases", nargs="*")
ap.add_argument("--tiny", action="store_true")
ap.add_argument("--here", action="store_true", help="no processes: one case, for a debugger")
args = ap.parse_args()
DEVICE = "cpu" if args.tiny else "cuda"
PATIENCE = 1800  # seconds for a case: so long that only one that hangs needs them
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
    "The result of `f`, and the gradients of the inputs that want one."
    out = f(*inputs)
    g = torch.Generator(DEVICE).manual_seed(1)
    arrived = torch.randn(out.shape, device=DEVICE, generator=g).to(out.dtype)
    return [out, *torch.autograd.grad(out, [t for t in inputs if t.requires_grad], arrived)]


def numbered(name, low, wide):
    return [(f"{name} {i}", a, b) for i, (a, b) in enumerate(zip(low, wide, strict=True))]


def both(f, *inputs):
    "Results and gradients of `f` in the low type and in fp32."
    wide = [t.detach().float().requires_grad_(t.requires_grad) for t in inputs]
    return numbered("tensor", gradients(f, *inputs), gradients(f, *wide))


SEEDS = itertools.count()


def draw(*shape, grad=True):
    g = torch.Generator(DEVICE).manual_seed(next(SEEDS))
    return torch.randn(shape, device=DEVICE, generator=g).to(TYPE).requires_grad_(grad)


def product(x, w):
    return x @ w.t()


def matrices():
    "The products of a stream of text, of both streams and of an adapter."
    sizes = [(8, 16, 4)]
    if not args.tiny:
        sizes = [(rows, 3072, n) for rows in (1, 512, 4096, 4608) for n in (16, 3072, 18432)]
        sizes += [(rows, 12288, n) for rows in (512, 4096) for n in (16, 3072)]
        sizes += [(512, 16, 3072), (4096, 16, 12288)]
    said = []
    for m, k, n in sizes:
        said.append(f"{m}x{k}x{n} {judge(both(product, draw(m, k), draw(n, k)))}")
    return "; ".join(said)


def rms_norm(x, scale):
    return functional.rms_norm(x, (128,), scale, 1e-6)


def norms():
    """RMSNorm of queries and keys, its scale trained and frozen.

    Ten times, since a race does not always show.
    """
    all_rows, all_heads = ((16,), (2,)) if args.tiny else ((512, 4096, 4608), (24, 32))
    said = []
    for rows, heads, train in itertools.product(all_rows, all_heads, (True, False)):
        pairs = []
        for _ in range(10):
            pairs += both(rms_norm, draw(1, rows, heads, 128), draw(128, grad=train))
        said.append(f"{rows}x{heads}{'' if train else ' frozen'} {judge(pairs)}")
    return "; ".join(said)


def scaled_dot_products(q, k, v):
    "Attention of tensors (batch, tokens, heads, channels)."
    across = (t.transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(*across).transpose(1, 2)


def near_ten_times(name, inputs, exact):
    "The largest distance of attention and its gradients from `exact`, the last of ten times."
    for _ in range(10):
        one = judge(numbered(name, gradients(scaled_dot_products, *inputs), exact))
    return f"{name} {one}"


def attention():
    "Attention as SDPA chooses it, and each of its backends that is there, ten times."
    inputs = [draw(1, ROWS, HEADS, 128) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        wide = [t.detach().float().requires_grad_() for t in inputs]
        exact = gradients(scaled_dot_products, *wide)
    said = [near_ten_times("chosen", inputs, exact)]
    for name, kind in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash", SDPBackend.FLASH_ATTENTION),
    ):
        try:
            with sdpa_kernel([kind]):
                said.append(near_ten_times(name, inputs, exact))
        except RuntimeError as e:
            if not any(w in str(e) for w in ("No available kernel", "No viable backend")):
                raise
            said.append(f"{name} not here")
    return "; ".join(said)


def packed():
    """Attention within each of four unequal samples, ten times, by each kernel that there is."""
    texts, images = (
        ([3, 7, 5, 1], [24, 9, 40, 2]) if args.tiny else ([512] * 4, [4096, 4032, 3952, 96])
    )
    spans = Packing.of(texts, images).spans
    rows = len(join_rows([torch.empty(n) for n in texts])) + len(
        join_rows([torch.empty(n) for n in images])
    )
    inputs = [draw(rows, HEADS, 128) for _ in range(3)]
    wide = [t.detach().float().requires_grad_() for t in inputs]

    def joint(q, k, v):
        return packed_attention(q, k, v, spans)[0]

    def alone(q, k, v):
        made = torch.zeros_like(q)
        for a, b, c, d in spans.tolist():
            own = torch.cat((torch.arange(a, b), torch.arange(c, d))).to(DEVICE)
            out = scaled_dot_products(*(x[own][None] for x in (q, k, v)))[0]
            made = made.index_put((own,), out)
        return made

    exact = gradients(alone, *wide)
    for _ in range(10):
        said = judge(numbered("tensor", gradients(joint, *inputs), exact))
    return f"{said}; in fp32 {judge(numbered('tensor', gradients(joint, *wide), exact))}"


def reference_rows(family, size, count):
    "Latents of two samples: `count` reference images, and one of half the height."
    height, wide = size
    tall, low = family.latent_shape(height, wide), family.latent_shape(height // 2, wide)
    g = torch.Generator(DEVICE).manual_seed(2)
    rows = [[tall] * count, [low]]
    return [[torch.randn(s, device=DEVICE, generator=g) for s in row] for row in rows]


def each_alone(batch, sizes):
    "The samples of a packed batch, each as a batch of its own."
    given = batch["conditioning"]
    for i, ((h, w), text) in enumerate(zip(sizes, given["packed"], strict=True)):
        own = {k: v[i : i + 1] for k, v in given.items() if torch.is_tensor(v)}
        own |= dict(text=own["text"][:, :text], mask=None)
        latents = {k: batch[k][i : i + 1, :, :h, :w] for k in ("x0", "noise")}
        yield latents | dict(sigma=batch["sigma"][i : i + 1], conditioning=own)


def batch_text(batch):
    "Tokens of each caption."
    return batch["conditioning"]["text"].shape[1]


def block_loss(objective, net, batch, kind):
    "The mean loss of a batch; in fp32 packed samples are alone."
    sizes = batch["conditioning"].get("sizes")
    if sizes and kind is not TYPE:
        parts = [objective.per_sample(net, one) for one in each_alone(batch, sizes)]
        return torch.cat(parts).mean()
    return objective.per_sample(net, batch).mean()


def block_gradients(model, lora, compiled, width, size, references, kind):
    """Loss and gradients of a network of a few blocks, computed in `kind`.

    From the same weights and batch for any `kind`. With `references`, of two samples which have
    unlike reference images, so that there is a mask. Where `size` is a list, of that many packed
    samples, with captions of unlike length where the model has such.
    """
    sizes = size if isinstance(size, list) else []
    size = tuple(map(max, zip(*sizes, strict=True))) if sizes else size
    low = kind is TYPE
    narrow = "bf16-mixed" if lora else "bf16"
    family = get_family(model)
    r = resolve(
        model=model,
        model_path="random",
        preset="debug",
        lora_rank=16 * lora,
        precision=narrow if low else "fp32",
        resolution=size[0],
        text_tokens=TEXT,
        compile=compiled and low,
        gradient_checkpointing="none",
        reference_images=references,
        micro_batch=len(sizes) or (2 if references else 1),
        global_batch=len(sizes) or (2 if references else 1),
        packing=bool(sizes),
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
    batch = one_batch(r, family, dict(net.config), torch.device(DEVICE), size)
    if references:
        rows = stack_references(reference_rows(family, size, references))
        batch["conditioning"] |= to_device(rows, torch.device(DEVICE))
    if sizes:
        latents = [family.latent_shape(*s)[1:] for s in sizes]
        texts = [TEXT, TEXT // 2 + 1, 7] if model == "qwenimage" else [batch_text(batch)] * 3
        batch["conditioning"] |= dict(sizes=latents, packed=texts)
        batch["sigma"] = torch.tensor([0.125, 0.25, 0.5], device=DEVICE)  # exact in 16 bits
    for _ in range(5 if low else 1):
        net.zero_grad()
        loss = block_loss(FlowMatching(r, family), net, batch, kind)
        loss.backward()
    assert loss.isfinite(), f"the loss is {loss.item()}"
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
    flux2_dev=dict(num_layers=2, num_single_layers=2),
    kontext=dict(num_layers=2, num_single_layers=2),
    qwenimage=dict(num_layers=2),
    qwenimage21=dict(num_layers=2),
    zimage=dict(n_layers=2, n_refiner_layers=1),
)
NARROW = dict(attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32)
if args.tiny:
    TWO["flux1"] |= NARROW | dict(pooled_projection_dim=32, axes_dims_rope=(4, 6, 6))
    TWO["kontext"] = TWO["flux1"]
    TWO["klein"] |= NARROW | dict(axes_dims_rope=(4, 4, 4, 4))
    TWO["flux2_dev"] = TWO["klein"]
    TWO["qwenimage"] |= NARROW | dict(axes_dims_rope=(4, 6, 6))
    narrow = NARROW | dict(axes_dims_rope=(4, 6, 6), context_in_dim=32)
    TWO["qwenimage21"] |= {k: v for k, v in narrow.items() if k != "joint_attention_dim"}
    TWO["zimage"] |= dict(dim=64, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=[4, 6, 6])
SQUARE = (SIDE, SIDE)
REFERENCES = dict(
    klein=2, flux2_dev=2, kontext=1, qwenimage21=2
)  # as many as a sample of a case has
PACKED = dict(
    klein=[(SIDE, SIDE), (SIDE // 2, 2 * SIDE), (SIDE // 4 * 5, SIDE // 4 * 3)],
    flux1=[(SIDE // 2, SIDE), (SIDE, SIDE // 4), (SIDE // 2, SIDE // 2)],
    qwenimage=[(SIDE, SIDE), (SIDE // 2, 2 * SIDE), (SIDE // 4 * 5, SIDE // 4 * 3)],
)  # height and width of figures that are packed
LARGE = [(1536, 1536), (2048, 2048), (1024, 3072)]  # height and width of figures, in pixels


def cases():
    """Name -> check."""
    found = dict(norms=norms, attention=attention, packed=packed, matrices=matrices)
    for model, sizes in PACKED.items():
        for compiled in (False, True)[: 2 - args.tiny]:
            name = f"{model}-packed" + "-compiled" * compiled
            found[name] = partial(blocks, model, False, compiled, TWO[model], sizes, 0)
    for model, width in TWO.items():
        if model in REFERENCES:
            for compiled in (False, True)[: 2 - args.tiny]:
                name = f"{model}-references" + "-compiled" * compiled
                case = (model, False, compiled, width, SQUARE, REFERENCES[model])
                found[name] = partial(blocks, *case)
        if model in ("kontext", "flux2_dev"):  # FLUX.1 but for the references; klein, but wider
            continue
        for lora, compiled in itertools.product((False, True), repeat=2):
            if compiled and args.tiny:
                continue
            name = model + "-lora" * lora + "-compiled" * compiled
            found[name] = partial(blocks, model, lora, compiled, width, SQUARE, 0)
        for height, wide in [(SIDE, 3 * SIDE)] if args.tiny else LARGE:
            size = (height, wide)
            name = f"{model}-{height}x{wide}"
            found[name] = partial(blocks, model, False, not args.tiny, width, size, 0)
    return found


CASES = cases()


def child(name):
    began = time.time()
    try:
        note = CASES[name]()
        print(f"ok    {name} ({time.time() - began:.0f} s) {note}", flush=True)
    except Exception as e:
        said = f"{type(e).__name__}: {str(e)[:600]}"
        print(f"FAIL  {name} ({time.time() - began:.0f} s) {said}", flush=True)
        traceback.print_exc(limit=-4)
        sys.exit(1)


def passes(name):
    "Whether a case passes in a process of its own: a broken CUDA context ends with it."
    command = [sys.executable, __file__, "--here", name, *["--tiny"] * args.tiny]
    try:
        return subprocess.run(command, timeout=PATIENCE).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"FAIL  {name}: not over after {PATIENCE} s", flush=True)
        return False


def main():
    if wrong := [c for c in args.cases if c not in CASES]:
        return f"no case {wrong}; known: {', '.join(CASES)}"
    if args.here:
        return child(args.cases[0])
    failed = [name for name in args.cases or CASES if not passes(name)]
    return f"{len(failed)} failed: {', '.join(failed)}" if failed else 0


sys.exit(main())
