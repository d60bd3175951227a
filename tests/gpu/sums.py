"""Two GPUs exchange gradients: torchrun --standalone --nproc_per_node 2 tests/gpu/sums.py

Sums are those of an all-reduce, bit by bit, whichever rank is late.
"""

import os
import time
from functools import partial

import torch
import torch.distributed as dist

from sciftune.strategies.gradient_sums import pair_sums, start_sum

ROUNDS, LARGEST = 200, 1 << 24

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
for dtype in (torch.bfloat16, torch.float32):
    pair = pair_sums(device, LARGEST, dtype)
    assert pair is not None, "these GPUs do not reach each other"
    sizes = torch.Generator().manual_seed(0)  # the same on both ranks
    values = torch.Generator(device).manual_seed(rank)
    for i in range(ROUNDS):
        shapes = torch.randint(1, 1500, (8, 2), generator=sizes).tolist()
        made = [torch.randn(s, generator=values, device=device, dtype=dtype) for s in shapes]
        if i % 7 == rank:
            torch.cuda._sleep(20_000_000)  # this rank is late
        right = start_sum([g.clone() for g in made], dtype)()
        wait = pair.start(made)
        made[0] @ made[0].T  # beside the exchange
        assert all(torch.equal(a, b) for a, b in zip(wait(), right, strict=True)), i
    large = [torch.ones(LARGEST, device=device, dtype=dtype)]
    for way, name in ((pair.start, "exchanged"), (partial(start_sum, dtype=dtype), "all-reduced")):
        way(large)()
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            way(large)()
        torch.cuda.synchronize()
        each = (time.perf_counter() - begun) / 20
        if rank == 0:
            print(f"{dtype}: {name}, {LARGEST * dtype.itemsize / each / 1e9:.0f} GB/s", flush=True)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(f"{2 * ROUNDS} sums equal those of an all-reduce", flush=True)
