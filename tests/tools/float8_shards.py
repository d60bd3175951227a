"""Float8 layers under FSDP2 against one process, on two CPUs; each rank says `fine`.

    torchrun --standalone --nproc_per_node 2 tests/tools/float8_shards.py

Both ranks compute the same rows, so gradients are those of one process.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sciftune.strategies.float8 import Float8Linear


def layers():
    "Three blocks with the same weights in every call."
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    for block in model:
        block[0].__class__ = Float8Linear
    return model.bfloat16()


def trained(model):
    "The gradients of one backward pass; 33 rows are no multiple of 16."
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    model(x).float().square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check():
    "Of this rank; raises where a gradient is another."
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    right = trained(layers())
    for reshard in (True, False):
        for compiled in (True, False):
            model = layers()
            for block in model:
                if compiled:
                    block.forward = torch.compile(
                        block.forward, backend="aot_eager", fullgraph=True
                    )
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            found = trained(fully_shard(model, mesh=mesh))
            for name, gradient in found.items():
                apart = (gradient.full_tensor() - right[name]).norm() / right[name].norm()
                assert apart < 1e-2, (name, reshard, compiled, apart)
    dist.destroy_process_group()


if __name__ == "__main__":
    check()
    print("fine")
