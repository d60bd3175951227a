"""Compare flex attention with dense masks on one GPU: the kernel alone, then a few layers of BAGEL.

    python tests/tools/attention_speed.py OUT [--tokens N] [--layers N] [--tiny]

Outputs and gradients, times and memory are compared; --tiny uses small shapes and only the forward
pass, to test the program on a CPU. Results on an H200 are in docs/bagel.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sciftune.extras.bagel.family import TINY, Bagel
from sciftune.extras.bagel.network import (
    BagelConfig,
    DenseAttention,
    FlexAttention,
    block_mask,
    sample_masks,
)
from sciftune.extras.bagel.packing import (
    PackedBatch,
    Packer,
    PackingRules,
    add_sample,
    packed_batch,
)
from sciftune.extras.bagel.release import forward_flops
from sciftune.extras.bagel.sequences import SpecialTokens, plan_item


@dataclass
class AttentionCase:
    """The sizes of a comparison.

    Attributes:
        tokens: approximate tokens of a pack
        layers: layers of the model
        tiny: small shapes on a CPU
    """

    tokens: int = 10240
    layers: int = 2
    tiny: bool = False

    @property
    def device(self) -> str:
        """Return the device of the computation."""
        return "cpu" if self.tiny else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the computation."""
        return torch.float32 if self.tiny else torch.bfloat16

    @cached_property
    def config(self) -> BagelConfig:
        """Return the configuration of the model."""
        return BagelConfig(**TINY, vocab_size=256) if self.tiny else BagelConfig(layers=self.layers)

    @cached_property
    def rules(self) -> PackingRules:
        """Return the rules for packing samples."""
        special = SpecialTokens(250, 251, 252, 253) if self.tiny else SpecialTokens()
        return PackingRules.from_config(self.config, special)

    @property
    def sides(self) -> tuple[int, int]:
        """Return the pixels of a generated image and of an input image."""
        return (32, 28) if self.tiny else (704, 392)

    @property
    def words(self) -> tuple[int, int]:
        """Return the tokens of a short and a long text."""
        return (4, 9) if self.tiny else (30, 220)


def mixed_pack(
    case: AttentionCase,
) -> PackedBatch:
    """Create a packed micro-batch of random texts and images."""
    generator = torch.Generator().manual_seed(0)
    packer, rules = Packer(case.rules), case.rules
    tokens = 400 if case.tiny else case.tokens
    big, small = case.sides
    short, long = case.words

    def words(count: int) -> list[int]:
        return torch.randint(0, 200, (count,), generator=generator).tolist()

    def pixels(side: int) -> Tensor:
        return torch.randn(3, side, side, generator=generator).clamp(-1, 1)

    def noise(item: int) -> Callable[[int], Tensor]:
        return lambda count: torch.randn(2, count, rules.latent_size, generator=generator)

    draw, see, clean = plan_item("vae_image", True), plan_item("vit_image"), plan_item("vae_image")
    ask, answer = plan_item("text"), plan_item("text", True)
    while packer.at < tokens:
        for plan, texts, images in (
            ([ask, draw], [words(long)], [pixels(big)]),
            ([clean, see, ask, draw], [words(short)], [pixels(big), pixels(small), pixels(big)]),
            ([see, ask, answer], [words(short), words(long)], [pixels(small)]),
        ):
            if packer.at < tokens:
                kept = [True] * len(plan)
                times = torch.randn(len(plan), generator=generator).tolist()
                add_sample(packer, plan, texts, images, kept, times, noise)
    batch = packed_batch(packer)
    batch["vit_token_seqlens"] = batch["vit_token_seqlens"].tolist()
    del batch["padded_images"]
    latents = len(batch["packed_vae_token_indexes"])
    batch["packed_vae_tokens"] = torch.randn(latents, rules.latent_size, generator=generator)
    return batch


class Measured(NamedTuple):
    """Result and cost of a call.

    Attributes:
        seconds: per call
        gib: above the earlier allocation; 0 on a CPU
    """

    result: object
    seconds: float
    gib: float


def measure_call(
    call: Callable[[], object],
    cuda: bool,
    count: int = 5,
) -> Measured:
    """Call several times on a GPU, after two calls that compile; once on a CPU."""
    if not cuda:
        began = time.perf_counter()
        return Measured(call(), time.perf_counter() - began, 0.0)
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    for _ in range(count):
        result = call()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / count
    return Measured(result, seconds, (torch.cuda.max_memory_allocated() - before) / 2**30)


def relative_distance(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Return the largest relative distance of paired tensors of equal shapes."""
    pairs = [(a.float(), b.float()) for a, b in zip(wanted, got, strict=True)]
    return max(float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs)


def compared(what: str, dense: Measured, flex: Measured, allowed: float, **more: float) -> dict:
    """Return a row of the report.

    Args:
        what: name of the row
        dense: result with dense masks
        flex: result with flex attention
        allowed: largest relative distance
        **more: other columns

    Raises:
        AssertionError: the results differ
    """
    distance = relative_distance(dense.result, flex.result)
    assert distance < allowed, f"{what}: {distance:.1e} apart, allowed {allowed:.0e}"
    row = {"what": what, "dense": dense.seconds, "flex": flex.seconds}
    return row | {"dense_gib": dense.gib, "flex_gib": flex.gib, "difference": distance} | more


def attention_row(
    case: AttentionCase,
    batch: PackedBatch,
) -> dict:
    """Compare one layer's attention on a pack: outputs, and gradients on a GPU."""
    lens, splits, modes = batch["sample_lens"], batch["split_lens"], batch["attn_modes"]
    config, cuda, device = case.config, not case.tiny, case.device
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(
            sum(lens), n, config.head_dim, device=device, dtype=case.dtype, requires_grad=cuda
        )
        for n in (config.heads, config.kv_heads, config.kv_heads)
    )

    def run(attention: Callable) -> tuple[Tensor, ...]:
        out = attention(0, query, key, value)
        if not cuda:
            return (out,)
        return (out, *torch.autograd.grad(out.float().square().sum(), (query, key, value)))

    by_mask = DenseAttention(sample_masks(lens, splits, modes, device))
    by_flex = FlexAttention(lens, splits, modes, device)
    dense = measure_call(lambda: run(by_mask), cuda)
    flex = measure_call(lambda: run(by_flex), cuda)
    return compared("attention, one layer", dense, flex, 2e-2 if cuda else 1e-5)


def model_row(
    case: AttentionCase,
    batch: PackedBatch,
) -> dict:
    """Compare a model of a few layers on a pack: losses, and first-layer gradients on a GPU."""
    cuda = not case.tiny
    model = Bagel().random_denoiser(case.config, case.dtype, case.device)
    nn.init.normal_(model.llm2vae.weight, std=0.02)
    model.enable_gradient_checkpointing()
    batch = batch.to(case.device)

    def step(kind: str) -> tuple[Tensor, ...]:
        model.attention = kind
        model.zero_grad()
        with torch.set_grad_enabled(cuda):
            out = model(batch)
            if cuda:
                (out.ce.mean() + out.mse.mean()).backward()
        first = [
            parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and "layers.0." in name and "vit" not in name
        ]
        return (out.ce.detach(), out.mse.detach(), *first)

    dense = measure_call(lambda: step("dense"), cuda)
    flex = measure_call(lambda: step("flex"), cuda)
    tokens = sum(batch["sample_lens"])
    flops = 3 * forward_flops(case.config, [*batch["sample_lens"], -tokens % 128])
    return compared(
        f"model of {case.config.layers} layers, forward{' and backward' if cuda else ''}",
        dense,
        flex,
        5e-2 if cuda else 1e-4,
        flex_tflops=flops / flex.seconds / 1e12,
        dense_tflops=flops / dense.seconds / 1e12,
    )


def mask_row(
    case: AttentionCase,
    batch: PackedBatch,
) -> dict:
    """Measure the time for a pack's block mask, and the share of pairs that it hides."""
    lens, splits, modes = batch["sample_lens"], batch["split_lens"], batch["attn_modes"]
    length = sum(lens)
    rest = -length % 128
    if rest:
        lens, splits, modes = [*lens, rest], [*splits, rest], [*modes, "causal"]

    def build() -> object:
        return block_mask(lens, splits, modes, case.device)

    made = measure_call(build, not case.tiny)
    sparsity = float(made.result.sparsity())
    return {"what": "block mask", "seconds": made.seconds, "gib": made.gib, "sparsity": sparsity}


def row_text(
    row: dict,
) -> str:
    """Format a row."""
    shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()}
    return "  ".join(f"{name} {value}" for name, value in shown.items())


def compare_attention(case: AttentionCase, out: Path) -> list[dict]:
    """Compare both attentions on one pack, and return the rows.

    Args:
        case: sizes
        out: folder for attention.json
    """
    out.mkdir(parents=True, exist_ok=True)
    batch = mixed_pack(case)
    counts = {"text": "text", "seen": "vit_token", "latents": "vae_token"}
    sizes = {name: len(batch[f"packed_{key}_indexes"]) for name, key in counts.items()}
    lens = batch["sample_lens"]
    rows = [{"what": "pack", "tokens": sum(lens), "samples": len(lens)} | sizes]
    print(row_text(rows[0]), flush=True)
    for measure in (mask_row, attention_row, model_row):
        rows.append(measure(case, batch))
        print(row_text(rows[-1]), flush=True)
    name = "cpu" if case.tiny else torch.cuda.get_device_name()
    record = {"device": name, "torch": torch.__version__, "config": asdict(case.config)}
    (out / "attention.json").write_text(json.dumps(record | {"rows": rows}, indent=1))
    return rows


def attention_command(words: list[str]):
    """Run `python -m sciftune.extras.bagel.attention OUT [--tokens N] [--layers N] [--tiny]`.

    Args:
        words: the command line
    """
    parser = argparse.ArgumentParser(prog="attention_speed.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=10240)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU")
    given = parser.parse_args(words)
    compare_attention(AttentionCase(given.tokens, given.layers, given.tiny), given.out)


if __name__ == "__main__":
    attention_command(sys.argv[1:])
