"""How FSDP2 sums bf16 gradients over ranks: what comes out, and what it costs beside products.

    torchrun --standalone --nproc_per_node 4 tests/gpu/sums.py [--tiny]

A stack of wide linear layers, kept gathered, forward and backward. One line for each way: exchange
(`AllToAllReduceScatter`), torch's reduce-scatter in fp32 and in bf16, and nothing summed (what the
products take by themselves). It says the median milliseconds of a step and the share of gradients
that differ from fp32 sums. Then the milliseconds of ddp's `shard_states`, with an optimizer that
changes nothing, ddp's exchanged sums, many behind each other, and the updates of `shard_states`.
--tiny: small, over gloo on CPUs.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sciftune.strategies.ddp import start_exchanged_sum, start_sum
from sciftune.strategies.flat_weights import FlatSums
from sciftune.strategies.fsdp import AllToAllReduceScatter
from sciftune.strategies.gradient_release import GradientRelease

WAYS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "exchange": torch.bfloat16,
    "nothing": torch.bfloat16,
}


def plain_stack(device, layers, width):
    "The same weights in every call."
    torch.manual_seed(0)
    kind = dict(dtype=torch.bfloat16, device=device)
    return nn.Sequential(*[nn.Linear(width, width, bias=False, **kind) for _ in range(layers)])


def stack(way, mesh, layers, width):
    "The same weights in every call, sharded."
    model = plain_stack(mesh.device_type, layers, width)
    policy = MixedPrecisionPolicy(reduce_dtype=WAYS[way])
    config = dict(mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for layer in model:
        fully_shard(layer, **config)
        if way == "exchange":
            layer.set_custom_reduce_scatter(AllToAllReduceScatter())
    model = fully_shard(model, **config)
    model.set_requires_gradient_sync(way != "nothing")
    return model


def step(model, x):
    "Forward and backward; seconds until the device has done it."
    cuda = x.is_cuda
    began = time.perf_counter()
    model(x).float().square().mean().backward()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


class NoUpdates:
    "An optimizer whose updates change nothing."

    def __init__(self, pieces):
        self.param_groups = [dict(params=pieces)]
        self.device = pieces[0].device

    def joins(self, device):
        return True

    def step_params(self, pieces, gradients, group):
        pass

    def take_squares(self):
        return torch.zeros((), device=self.device)


def time_shards(x, layers, steps):
    "A line for sums and gathers of `shard_states` beside products."
    model = plain_stack(x.device.type, layers, x.shape[1])
    names = {id(p): name for name, p in model.named_parameters()}
    ranks = dist.get_rank(), dist.get_world_size()
    stream = torch.cuda.Stream() if x.is_cuda else None
    sums = FlatSums([*model, model], names, *ranks, torch.bfloat16, True, stream)
    optimizer = NoUpdates([sums.piece(p) for p in model.parameters()])
    release = GradientRelease(model, optimizer, 0.0, list(model), sums)
    spent = []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        model(x).float().square().mean().backward()
        release.finish()
        if x.is_cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    if not dist.get_rank():
        print(f"{'shards':10} {1000 * statistics.median(spent[1:]):9.2f} ms", flush=True)


def exchange_beside_products(device, width, turns=12):
    "ddp's sums, each begun before the last is taken, beside products: the bits of fp32 sums."
    stream = torch.cuda.Stream() if device == "cuda" else None
    random = torch.Generator(device).manual_seed(dist.get_rank())
    square = torch.randn(width, width, generator=random, device=device).bfloat16()
    waiting, differ = None, 0
    for turn in range(turns + 1):
        before, waiting = waiting, None
        found = before[1]() if before else None
        if turn < turns:
            sizes = (width * (turn + 1), 3), (width, turn + 2), (5,)
            given = dict(generator=random, device=device)
            gradients = [torch.randn(*size, **given).bfloat16() for size in sizes]
            wide = [g.float() for g in gradients]
            waiting = wide, start_exchanged_sum(gradients, stream)
            del gradients
        for _ in range(4):
            square = (square @ square).clamp(-1, 1)
        if before:
            right = start_sum(before[0], torch.float32)()
            pairs = zip(found, right, strict=True)
            differ += sum((a != b.bfloat16()).sum().item() for a, b in pairs)
    assert not differ, f"ddp: {differ} exchanged sums are not those of fp32"
    if not dist.get_rank():
        print(f"ddp        {turns} exchanges beside products give the bits of fp32 sums")


def updates_beside_products(device, width, turns=12):
    "Parts that ranks update and gather, beside products: the weights of a rank that has the sums."
    stream = torch.cuda.Stream() if device == "cuda" else None
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    kind = dict(dtype=torch.bfloat16, device=device)
    layers = [
        nn.Sequential(
            nn.Linear(width, width // 4 + i, **kind), nn.Linear(width // 4 + i, 64, **kind)
        )
        for i in range(turns)
    ]
    layers = nn.ModuleList(layers)
    names = {id(p): name for name, p in layers.named_parameters()}
    right = {name: p.detach().clone() for name, p in layers.named_parameters()}
    sums = FlatSums([*layers, layers], names, rank, world, torch.bfloat16, True, stream)
    random = torch.Generator(device).manual_seed(rank)
    square = torch.randn(width, width, generator=random, device=device).bfloat16()

    def update(pieces, totals):
        for piece, total in zip(pieces, totals, strict=True):
            piece.data -= total

    waiting = None
    for layer in [*layers, *layers]:  # each twice: its weights, gathered, change again
        params = list(layer.parameters())
        given = dict(generator=random, device=device)
        gradients = [torch.randn(p.shape, **given).bfloat16() for p in params]
        wide = start_sum([g.float() for g in gradients], torch.float32)()
        for p, total in zip(params, wide, strict=True):
            right[names[id(p)]] -= total.bfloat16()
        if waiting:
            waiting()
        waiting = sums.start(params, gradients, update)
        del gradients
        for _ in range(4):
            square = (square @ square).clamp(-1, 1)
    sums.wait()
    pairs = [(p.detach(), right[name]) for name, p in layers.named_parameters()]
    differ = sum((a != b).sum().item() for a, b in pairs)
    share = differ / sum(a.numel() for a, _ in pairs)  # another order of terms rounds a few
    assert share < 1e-6, f"ddp with shard_states: {differ} weights are not those of fp32 sums"
    if not rank:
        print(
            f"ddp        {2 * turns} updates of parts beside products, gathered, are those of all"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    dist.init_process_group("gloo" if tiny else "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    if not tiny:
        torch.cuda.set_device(rank)
    device = "cpu" if tiny else "cuda"
    mesh = init_device_mesh(device, (world,))
    layers, width, rows, steps = (3, 64, 32, 3) if tiny else (8, 16384, 16384, 8)
    torch.manual_seed(rank + 1)
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    right = None
    for way in WAYS:
        model = stack(way, mesh, layers, width)
        step(model, x)
        spent = []
        for _ in range(steps):
            model.zero_grad()
            dist.barrier()
            spent.append(step(model, x))
        if way != "nothing":  # gradients of the last step, beside products
            found = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
            right = found if right is None else right
            other = (found != right).float().mean()
            dist.all_reduce(other)
        differ = "" if way == "nothing" else f"{other.item() / world:.2e} of the gradients differ"
        if not rank:
            print(f"{way:10} {1000 * statistics.median(spent):9.2f} ms  {differ}", flush=True)
        if way == "exchange":
            assert other.item() / world < 1e-3, "exchanged sums are not those of fp32"
        del model
    time_shards(x, layers, steps)
    exchange_beside_products(device, 256 if tiny else 8192)
    updates_beside_products(device, 256 if tiny else 8192)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
