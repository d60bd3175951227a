"""The three networks of DMD2 under DDP and FSDP2: the same numbers as in one process.

In processes of their own, because they need a process group.
"""

import os
import queue
import socket
import sys

import diffusers
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forked import wait
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


def networks(engine, recompute, gan):
    discriminator = (discriminator_head(16, 8, groups=4), SD.features) if gan else ()
    plain = dict(
        critic=Critic(unet(2), SD.predict_at, *discriminator),
        generator=unet(1),
        teacher=unet(0).requires_grad_(False),
    )
    return {name: wrap(net, engine, recompute) for name, net in plain.items()}


def batches(mine):
    "The samples numbered `mine` of each step."
    g = torch.Generator().manual_seed(0)
    text = torch.randn(STEPS, SAMPLES, 5, 6, generator=g)
    real = torch.randn(STEPS, SAMPLES, 4, 16, 16, generator=g)
    for i in range(STEPS):
        conditioning = dict(text=text[i, mine])
        yield dict(
            shape=(len(mine), 4, 16, 16),
            conditioning=conditioning,
            unconditional=dict(text=torch.zeros(1, 5, 6)),
            real_latents=real[i, mine],
            real_conditioning=conditioning,
            random=KeyedRandomSource(3, i, [(i, s) for s in mine]),
        )


def check_gradients(nets, trained):
    "Every parameter of the network `trained` has one, and no other network has any."
    for name, net in nets.items():
        assert name == trained or all(p.grad is None for p in net.parameters()), (
            f"{name} collected gradients in the optimizer step of {trained}"
        )
    missing = [name for name, p in nets[trained].named_parameters() if p.grad is None]
    assert not missing, (
        f"{trained}: no gradient for {missing[:5]}; {len(missing)} parameters have none"
    )


def gradient_norm(net):
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def run(engine, rank=0, world=1, recompute=False, steps=1, gan=True):
    "Losses, averaged over the ranks, and gradient norms of all optimizer steps."
    torch.set_num_threads(1)
    nets = networks(engine, recompute, gan)
    optimizers = {k: torch.optim.AdamW(nets[k].parameters(), 1e-4) for k in ("generator", "critic")}
    objective = DMD2(DMDSettings(generator_every=2, gan=gan, denoising_steps=steps), SD.predict_at)
    mine = range(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    out = []
    for i, batch in enumerate(batches(mine)):
        for update in objective.optimizer_steps(i):
            loss, _ = objective.loss(update, nets, batch)
            loss.backward()
            check_gradients(nets, update.network)
            norm = gradient_norm(nets[update.network])
            optimizers[update.network].step()
            optimizers[update.network].zero_grad(set_to_none=True)
            value = loss.detach().clone()
            if world > 1:
                dist.all_reduce(value)
            out.append((value.item() / world, norm))
    return out


def worker(rank, world, engine, recompute, steps, gan, port, answers):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    result = run(engine, rank, world, recompute, steps, gan)
    dist.barrier()
    if rank == 0:
        answers.put(result)
    answers.close()
    answers.join_thread()
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def answer(answers, workers):
    "What a worker has put into the queue; raises when one has failed or all have ended without it."
    while True:
        over = any(w.exitcode for w in workers) or not any(w.is_alive() for w in workers)
        try:
            return answers.get(timeout=1)
        except queue.Empty:
            if over:
                codes = [w.exitcode for w in workers]
                raise RuntimeError(
                    f"no answer; exit codes (None: still running): {codes}"
                ) from None


def together(engine, world, recompute, steps, gan):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("fork")
    answers = context.Queue()
    case = (world, engine, recompute, steps, gan, port, answers)
    workers = [context.Process(target=worker, args=(rank, *case)) for rank in range(world)]
    for w in workers:
        w.start()
    try:
        result = answer(answers, workers)
    except BaseException:
        for w in workers:
            w.kill()
        raise
    assert wait(workers) == [0] * world
    return result


@pytest.mark.parametrize(
    "engine,world,recompute,steps,gan",
    [
        ("ddp", 2, False, 1, True),
        pytest.param("fsdp", 2, False, 1, False, marks=pytest.mark.slow),
        ("fsdp", 2, True, 4, True),
        pytest.param("fsdp", 4, False, 1, True, marks=pytest.mark.slow),
    ],
)
def test_same_as_single(engine, world, recompute, steps, gan):
    alone = run("single", steps=steps, gan=gan)
    shared = together(engine, world, recompute, steps, gan)
    assert len(alone) == len(shared) == STEPS + STEPS // 2
    for (l1, g1), (l2, g2) in zip(alone, shared, strict=False):
        assert abs(l1 - l2) < 1e-5 and abs(g1 - g2) < 1e-4 * max(g1, 1), (alone, shared)
