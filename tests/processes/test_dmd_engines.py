"The three networks of DMD2 under DDP and FSDP2: the same numbers as in one process. In processes of their own, because they need a process group."

import os
import socket
import sys

import diffusers
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from sciftune.models.family import get_family
from sciftune.objectives.dmd.loss import (
    DMD2,
    Critic,
    DMDSettings,
    KeyedRandomSource,
    discriminator_head,
)

STEPS, SAMPLES, SD = 6, 4, get_family("sd15")


def unet(seed):
    torch.manual_seed(seed)
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=6,
        attention_head_dim=2,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def wrap(net, engine, recompute):
    if recompute:
        getattr(net, "denoiser", net).enable_gradient_checkpointing()
    if engine == "ddp" and any(p.requires_grad for p in net.parameters()):
        return torch.nn.parallel.DistributedDataParallel(net)
    if engine == "fsdp":
        for m in net.modules():
            if type(m).__name__ in SD.block_classes:
                fully_shard(m)
        fully_shard(net)
    return net


def run(engine, rank=0, world=1, recompute=False, steps=1, gan=True):
    "Losses and gradient norms of all turns, and the gathered images of the last generator."
    torch.set_num_threads(1)
    critic = Critic(
        unet(2), SD.epsilon, *((discriminator_head(16, 8, groups=4), SD.features) if gan else ())
    )
    nets = {
        k: wrap(n, engine, recompute)
        for k, n in dict(
            generator=unet(1), teacher=unet(0).requires_grad_(False), critic=critic
        ).items()
    }
    optimizers = {k: torch.optim.AdamW(nets[k].parameters(), 1e-4) for k in ("generator", "critic")}
    objective = DMD2(DMDSettings(generator_every=2, gan=gan, steps=steps), SD.epsilon)
    mine = range(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    g = torch.Generator().manual_seed(0)
    text, real = (
        torch.randn(STEPS, SAMPLES, 5, 6, generator=g),
        torch.randn(STEPS, SAMPLES, 4, 16, 16, generator=g),
    )
    out = []
    for i in range(STEPS):
        cond = dict(text=text[i, mine])
        batch = dict(
            shape=(len(mine), 4, 16, 16),
            conditioning=cond,
            unconditional=dict(text=torch.zeros(1, 5, 6)),
            real_latents=real[i, mine],
            real_conditioning=cond,
            random=KeyedRandomSource(3, i, [(i, s) for s in mine]),
        )
        for turn in objective.turns(i):
            loss, _ = objective.loss(turn, nets, batch)
            loss.backward()
            for k, n in nets.items():
                assert k == turn.network or all(p.grad is None for p in n.parameters()), (
                    f"{k} collected gradients in the turn of {turn.network}"
                )
            missing = [n for n, p in nets[turn.network].named_parameters() if p.grad is None]
            assert not missing, (
                f"{turn.network} in step {i}: no gradient for {missing[:5]} and {len(missing)} in all"
            )
            norm = torch.nn.utils.get_total_norm([p.grad for p in nets[turn.network].parameters()])
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            optimizers[turn.network].step()
            optimizers[turn.network].zero_grad(set_to_none=True)
            value = loss.detach().clone()
            if world > 1:
                dist.all_reduce(value)
            out.append((value.item() / world, norm.item()))
    return out


def worker(rank, world, engine, recompute, steps, gan, port, queue):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    result = run(engine, rank, world, recompute, steps, gan)
    dist.barrier()
    if rank == 0:
        queue.put(result)
    queue.close()
    queue.join_thread()
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def together(engine, world, recompute, steps, gan):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=worker, args=(r, world, engine, recompute, steps, gan, port, queue))
        for r in range(world)
    ]
    for w in workers:
        w.start()
    try:
        result = queue.get(timeout=40)
    finally:
        for w in workers:
            w.join(20)
            if w.is_alive():
                w.kill()
    assert [w.exitcode for w in workers] == [0] * world
    return result


@pytest.mark.parametrize(
    "engine,world,recompute,steps,gan",
    [
        ("ddp", 2, False, 1, True),
        ("fsdp", 2, False, 1, False),
        ("fsdp", 2, True, 4, True),
        ("fsdp", 4, False, 1, True),
    ],
)
def test_same_as_single(engine, world, recompute, steps, gan):
    alone, shared = (
        run("single", steps=steps, gan=gan),
        together(engine, world, recompute, steps, gan),
    )
    assert len(alone) == len(shared) == STEPS + STEPS // 2
    for (l1, g1), (l2, g2) in zip(alone, shared, strict=False):
        assert abs(l1 - l2) < 1e-5 and abs(g1 - g2) < 1e-4 * max(g1, 1), (alone, shared)
