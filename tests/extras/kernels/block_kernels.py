"""Blocks with the kernels of `extras.kernels.blocks` against the model's own, on the CPU.

    TRITON_INTERPRET=1 python tests/extras/kernels/block_kernels.py [all]

Prediction and all gradients of small models whose samples have two parts, of unequal tables and
strides, and of packed samples, within 1e-5; the last line says `fine`. klein has every kernel and
runs all cases; of the others, which differ in their streams, samples of unequal sizes alone are
tried where `all` is not asked for.
"""

import copy
import sys
from collections import Counter

import torch

from sciftune.core.registry import find_record
from sciftune.extras.kernels import blocks as block_kernels
from sciftune.extras.kernels import launches as triton_kernels
from sciftune.extras.kernels.layers import replace_layers
from sciftune.models import packing
from sciftune.models.family import get_family
from sciftune.models.flux1 import TINY_FLUX1
from sciftune.models.flux2 import TINY_KLEIN
from sciftune.models.qwenimage import TINY_QWEN_IMAGE
from sciftune.models.tokens import stack_sizes
from sciftune.strategies import float8
from sciftune.strategies.compilation import (
    blocks_of,
    compile_blocks,
    compiled_graphs,
    real_rotary,
)

assert block_kernels.IN_INTERPRETER, "set TRITON_INTERPRET=1"
TINY = dict(
    klein=TINY_KLEIN | dict(num_attention_heads=3), flux1=TINY_FLUX1, qwenimage=TINY_QWEN_IMAGE
)
if "all" not in sys.argv:  # one block of each kind; FLUX.1 has the streams of klein
    del TINY["flux1"]
    for config in TINY.values():
        config.update({n: 1 for n in ("num_layers", "num_single_layers") if n in config})
packing.ROUNDING = 8  # the interpreter is slow
COMPILER = dict(backend="aot_eager", fullgraph=True)
counted = []


def count(name):
    "Count the calls: a test in which no kernel ran would pass, too."
    launch = getattr(triton_kernels, name)

    def counting(*args):
        counted.append(name)
        return launch(*args)

    setattr(triton_kernels, name, counting)


for kernel in ("launch_norm_rope", "launch_norm_rope_backward", "launch_copy", "launch_float8"):
    count(kernel)


def inputs(name, denoiser, sides, text):
    "Samples of these sizes, with padding where they differ."
    family, draw = get_family(name), torch.Generator().manual_seed(0)
    x, sizes = stack_sizes(
        [torch.randn(*family.latent_shape(*side), generator=draw) for side in sides]
    )
    shapes = family.caption_shapes(dict(denoiser.config), text)
    rows = [
        {
            k: torch.randn(*((text, s[1]) if len(s) == 2 else s), generator=draw)
            for k, s in shapes.items()
        }
        for _ in sides
    ]
    given = family.collate(rows) | (dict(sizes=sizes) if sizes else {})
    return x, torch.linspace(0.2, 0.8, len(sides)), given


def gradients(denoiser, name, sides, text, **more):
    "Prediction and gradients."
    denoiser.zero_grad()
    x, sigma, given = inputs(name, denoiser, sides, text)
    out = get_family(name).predict(denoiser, x, sigma, given | more)
    out.square().mean().backward()
    found = {n: p.grad.clone() for n, p in denoiser.named_parameters() if p.grad is not None}
    return out.detach(), found


def distance(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-6)).item()


def judge(label, made, right):
    "Raises where prediction or gradients are not near."
    (out, found), (exact_out, exact) = made, right
    worst = max((distance(found[n], exact[n]), n) for n in exact if exact[n].any())
    print(f"{label}: prediction {distance(out, exact_out):.1e}, gradients {worst}")
    assert list(found) == list(exact)
    assert distance(out, exact_out) < 1e-5 and worst[0] < 1e-4, worst


def judge_packed(name, plain, fast):
    "Packed samples in compiled blocks, with as many launches as their layers have parts."
    case = name, [(64, 32), (32, 32)], 5
    for denoiser in (plain, fast):
        get_family(name).prepare_packing(denoiser)
    compile_blocks(fast, find_record("models", name).block_classes, **COMPILER)
    counted.clear()
    block_kernels.IN_INTERPRETER = False
    right = gradients(plain, *case, packed=[5, 3])
    assert not counted
    block_kernels.IN_INTERPRETER = True
    judge(f"{name} packed", gradients(fast, *case, packed=[5, 3]), right)
    single = len(getattr(fast, "single_transformer_blocks", ()))
    rotated = 4 * len(fast.transformer_blocks) + 2 * single  # queries and keys, of each stream
    parts = dict(launch_norm_rope=rotated, launch_norm_rope_backward=rotated)
    copies = dict(launch_copy=single) if name == "klein" else {}
    assert Counter(counted) == parts | copies, counted


for name, config in TINY.items():
    plain = get_family(name).random_denoiser(config, torch.float32)
    dead = get_family(name).frozen_parameters(plain)
    for own, parameter in plain.named_parameters():
        parameter.requires_grad_(own not in dead)
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1, 0.3)
    real_rotary(plain)
    fast = copy.deepcopy(plain)
    blocks = blocks_of(fast, find_record("models", name).block_classes)
    replace_layers(fast, blocks)
    every = name == "klein" or "all" in sys.argv
    for sides in ([(32, 32)], [(32, 48), (48, 16)])[0 if every else 1 :]:
        counted.clear()
        torch.compiler.reset()
        graphs = compiled_graphs()
        block_kernels.IN_INTERPRETER = False
        right = gradients(plain, name, sides, 5)
        assert not counted
        block_kernels.IN_INTERPRETER = True
        if len(sides) == 1:  # a graph for blocks of a kind, and where inputs need no gradient
            for block in blocks:
                own = type(block).forward.__get__(block)
                block.forward = torch.compile(own, **COMPILER)
        else:
            for block in blocks if every else ():
                del block.forward
        made = gradients(fast, name, sides, 5)
        kinds = len({type(block) for block in blocks})
        assert compiled_graphs() - graphs <= 2 * kinds, (compiled_graphs(), graphs)
        with torch.no_grad():
            sampled = get_family(name).predict(fast, *inputs(name, fast, sides, 5))
        assert distance(sampled, right[0]) < 1e-5
        judge(f"{name} {len(sides)}", made, right)
        assert counted
    if every:
        judge_packed(name, plain, fast)
for shape in ((2, 3, 40), (6, 40)):
    x = torch.randn(shape, requires_grad=True)
    grad = torch.randn(*shape[:-1], 70)[..., :20]
    made = torch.autograd.grad(block_kernels.SwiGLU.apply(x), x, grad)[0]
    right = torch.autograd.grad(block_kernels.swiglu(x), x, grad)[0]
    assert distance(made, right) < 1e-6
for kind in (float8.INPUTS, float8.GRADIENTS):
    x = torch.randn(100, 300).bfloat16()[:, :290]
    scale = float8.float8_scale(x, kind)
    narrow, turned = float8.float8_both(x, scale, kind)
    right = float8.to_float8(x, scale, kind)
    assert distance(narrow.float(), right.float()) < 0.15  # the interpreter rounds otherwise
    assert torch.equal(turned[:, :100].float(), narrow.t().float())
    assert turned.shape == (290, 112) and not turned[:, 100:].float().any()
    assert torch.equal(float8.float8_turned(x, scale, kind).float(), turned.float())
assert counted.count("launch_float8") == 4
print("fine")
