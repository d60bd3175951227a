"""The optimizer's kernel against its definition in double precision.

    TRITON_INTERPRET=1 python tests/extras/kernels/adam_definition.py

Triton's interpreter runs the kernel on the CPU.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import flashoptim.optimizers
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from sciftune.extras.kernels.adam import UNIT, programs, update
from sciftune.strategies.optimizers import master_of, set_master


def groups(t):
    "The elements by those that share a scale, 32 a row, filled up with zeros."
    return functional.pad(t, (0, -len(t) % 32)).view(-1, 32)


def half(w):
    "Half of the last place of each bf16 weight."
    exponents = torch.frexp(w.float())[1]
    return torch.ldexp(torch.ones(len(w)), exponents - 9).double()


def largest(t):
    "The largest of each group, within what fp16 holds in units of 1/UNIT."
    return groups(t).abs().amax(1).clamp(1e-12, 65504 / UNIT)


def encode(mean, root):
    "Codes and fp16 scales of the first moment and of the root of the second."
    n = len(mean)
    mean_scales, root_scales = largest(mean), largest(root)
    ratio = groups(mean) / mean_scales[:, None]
    mean_codes = (2 * ratio / (1 + ratio.abs()) * 127).round()
    smallest_code = (groups(root) > 0).double()
    root_codes = torch.maximum(groups(root) / root_scales[:, None] * 255, smallest_code).round()
    return (
        mean_codes.view(-1)[:n],
        (mean_scales * UNIT).half(),
        root_codes.view(-1)[:n],
        (root_scales * UNIT).half(),
    )


@dataclass
class State:
    "Weights and all that the optimizer keeps of them; scales are in 1/UNIT, one for 32 elements."

    weights: Tensor  # (n,) bf16
    corrections: Tensor  # (n,) int8
    mean: Tensor  # (n,) int8
    mean_scales: Tensor  # (groups,) fp16
    root: Tensor  # (n,) uint8
    root_scales: Tensor  # (groups,) fp16

    @classmethod
    def new(cls, weights):
        "Before the first step."
        n = len(weights)
        return cls(
            weights,
            torch.zeros(n, dtype=torch.int8),
            torch.zeros(n, dtype=torch.int8),
            torch.zeros(-(-n // 32), dtype=torch.float16),
            torch.zeros(n, dtype=torch.uint8),
            torch.zeros(-(-n // 32), dtype=torch.float16),
        )

    def exact(self):
        "The weights with their corrections."
        return self.weights.double() + self.corrections.double() / 127 * half(self.weights)

    def moments(self):
        "The first moment and the root of the second."
        y = self.mean.double() / 127
        mean = y / (2 - y.abs()) * self.wide(self.mean_scales)
        return mean, self.root.double() / 255 * self.wide(self.root_scales)

    def wide(self, scales):
        "The scale of each element."
        return scales.double().repeat_interleave(32)[: len(self.weights)] / UNIT


@dataclass(frozen=True)
class AdamW:
    "The definition, and the kernel with the same settings."

    lr: float
    betas: tuple
    eps: float
    decay: float

    def after(self, step, x, mean, square, gradient):
        "Weights and both moments after a step."
        b1, b2 = self.betas
        mean = b1 * mean + (1 - b1) * gradient
        square = b2 * square + (1 - b2) * gradient * gradient
        root = (square / (1 - b2**step)).sqrt()
        moved = self.lr * (mean / (1 - b1**step)) / (root + self.eps)
        return x * (1 - self.lr * self.decay) - moved, mean, square

    def kernel(self, step, state, gradient):
        "Update `state`; the sum of squares of the gradient."
        squares = torch.zeros(programs(len(gradient), 1))
        update(
            state.weights,
            state.corrections,
            state.mean,
            state.mean_scales,
            state.root,
            state.root_scales,
            gradient,
            squares,
            step,
            self.lr,
            self.betas,
            self.eps,
            self.decay,
        )
        return squares.sum()


def close_codes(codes, expected):
    "Whether codes are equal but for a hundredth of them, which differ by one."
    apart = (codes.double() - expected).abs()
    return apart.max() <= 1 and (apart != 0).double().mean() < 0.01


def close_scales(scales, expected):
    return torch.allclose(scales.double(), expected.double(), rtol=2**-9, atol=1e-7)


def one_step(adam, step, state, gradient):
    "The kernel's step is the definition's, up to the places that the codes have."
    wide = gradient.double()
    mean, root = state.moments()
    x, mean, square = adam.after(step, state.exact(), mean, root * root, wide)
    mean_codes, mean_scales, root_codes, root_scales = encode(mean, square.sqrt())
    total = adam.kernel(step, state, gradient)
    error, last_place = (state.exact() - x).abs(), half(state.weights)
    assert error.max() <= 1.01 * (last_place / 254).max(), (len(x), step, error.max())
    assert (error <= last_place / 127).all(), "never more than one code away"
    assert close_codes(state.mean, mean_codes)
    assert close_codes(state.root, root_codes)
    assert close_scales(state.mean_scales, mean_scales)
    assert close_scales(state.root_scales, root_scales)
    assert abs(total / wide.square().sum() - 1) < 1e-5


def each_step_is_the_definition():
    torch.manual_seed(0)
    adam = AdamW(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, decay=0.1)
    for n, size in ((32, 0.01), (1000, 0.01), (2500, 0.01), (1000, 1e-7)):
        state = State.new((torch.randn(n) * 0.02).bfloat16())
        exact = state.weights.double()
        mean = square = torch.zeros(n).double()
        for step in range(1, 6):
            gradient = (torch.randn(n) * size).bfloat16()
            one_step(adam, step, state, gradient)
            exact, mean, square = adam.after(step, exact, mean, square, gradient.double())
        assert (state.exact() - exact).abs().mean() < 0.1 * adam.lr
        assert (state.weights.double() - exact).abs().mean() < 5 * adam.lr


def small_gradients_beside_large_ones():
    "Gradients of a large model, some a thousandth of their neighbours: updates stay AdamW's."
    adam = AdamW(lr=1e-5, betas=(0.9, 0.999), eps=1e-12, decay=0.0)
    n, g = 512, torch.Generator().manual_seed(0)
    state = State.new(torch.randn(n, generator=g).bfloat16() * 0.02)
    first = state.weights.double()
    moved = mean = square = torch.zeros(n).double()
    small = torch.arange(n) % 32 == 0
    bias = torch.randn(n, generator=g)
    for step in range(1, 41):
        draw = torch.randn(n, generator=g) + bias
        gradient = (draw * torch.where(small, 1e-9, 1e-6)).bfloat16()
        adam.kernel(step, state, gradient)
        moved, mean, square = adam.after(step, moved, mean, square, gradient.double())
    got = state.exact() - first
    error = got - moved
    assert error[~small].norm() / moved[~small].norm() < 0.03, error.norm() / moved.norm()
    assert got[small].abs().max() < 40 * adam.lr, "a small gradient never means a long step"


def after_three_steps(value):
    "Weights that were 0.5, each with the gradient `value` three times."
    adam = AdamW(lr=0.01, betas=(0.9, 0.99), eps=1e-8, decay=0.0)
    state = State.new(torch.full((64,), 0.5).bfloat16())
    for step in (1, 2, 3):
        adam.kernel(step, state, torch.full((64,), value).bfloat16())
    return state.weights


def gradients_without_a_scale():
    "Too large for the scales: a step of the usual length. No number: seen in the weight."
    large = after_three_steps(1e4)
    assert (large.double() - 0.5).abs().max() < 0.05 and (large.double() < 0.49).all(), large[:4]
    assert after_three_steps(float("nan")).isnan().all()


@triton.jit
def copysign(size, sign):
    return tl.where(sign < 0, -size, size)


class InLargeBlocks:
    "A kernel that treats each element alike, in blocks of 2^16: the interpreter pays for each."

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        launch = self.kernel[grid]
        return lambda *args, **options: launch(*args, **options | dict(BLOCK_SIZE=2**16))


def a_checkpoint_keeps_weight_and_correction():
    "Every bf16 weight of 2^-24 to 2^8 with every correction that a step can leave."
    for name in ("_reconstruct_fp32_kernel", "_compute_ecc_bits_kernel"):
        large = InLargeBlocks(getattr(flashoptim.optimizers, name))
        setattr(flashoptim.optimizers, name, large)
    flashoptim.optimizers._get_sm_count = lambda device=None: 1  # the interpreter has neither
    flashoptim.optimizers.libdevice = SimpleNamespace(copysign=copysign)
    weights = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    weights = weights[(weights >= 2**-24) & (weights < 2**8)]
    weights = torch.cat([weights, -weights])
    corrections = torch.arange(-127, 128, dtype=torch.int8)
    low, bits = weights.repeat_interleave(255), corrections.repeat(len(weights))
    power, inward = torch.frexp(low.float())[0].abs() == 0.5, bits.sign() == -low.sign()
    left = ~(power & inward & (bits.abs() > 64))  # beyond 63.5 the master rounds to another weight
    low, bits = low[left], bits[left]
    again, state = torch.zeros_like(low), dict(error_bits=torch.zeros_like(bits))
    set_master(again, master_of(low, dict(error_bits=bits)), state)
    assert torch.equal(again, low), "another weight"
    assert torch.equal(state["error_bits"], bits), "another correction"


if __name__ == "__main__":
    a_checkpoint_keeps_weight_and_correction()
    each_step_is_the_definition()
    small_gradients_beside_large_ones()
    gradients_without_a_scale()
    print("fine")
