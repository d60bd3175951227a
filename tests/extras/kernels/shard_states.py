"""ddp with `shard_states` and the real optimizer, on CPUs, against ddp without it.

    TRITON_INTERPRET=1 python tests/extras/kernels/shard_states.py

Losses, weights and all states of four ranks are compared bit by bit, gradient norms to rounding:
their squares are added in another order. Some ranks have nothing of a block to update.
"""

from unittest import mock

import flashoptim.optimizers
import torch

from sciftune.core.recipe import resolve
from sciftune.extras.kernels import sums as sum_kernel
from sciftune.extras.kernels.adam import LeanAdamW
from sciftune.project.ranks import on_ranks, toy_module
from sciftune.strategies.ddp import DDP
from sciftune.strategies.engine import Engine
from sciftune.strategies.precision import policy_for

torch.set_num_threads(1)
RANKS = 4
flashoptim.optimizers._get_sm_count = lambda *device: 1  # it asks a GPU


def network(shard_states):
    "The toy in bf16 with 24-bit masters."
    fields = dict(strategy="ddp", num_processes=RANKS, micro_batch=1, global_batch=RANKS, cpu=True)
    engine = Engine(resolve(**fields))
    change = dict(shard_states=shard_states, precision="bf16-master24", max_grad_norm=0.0)
    recipe = engine.recipe.model_copy(update=change)
    strategy = DDP(recipe, RANKS, policy_for(recipe, True), False)
    module = toy_module().bfloat16()
    torch.manual_seed(0)
    module[2] = torch.nn.Linear(5, 100, dtype=torch.bfloat16)  # several ranks share its weight
    with mock.patch("torch.cuda.is_available", lambda: True):
        return strategy.network_class(engine, module, "toy", strategy=strategy)


def training(shard_states):
    "Losses, norms, whole weights, and what this rank holds of the states."
    net = network(shard_states)
    assert net.release and isinstance(net.optimizer, LeanAdamW)
    losses, norms = [], []
    for step in range(3):
        random = torch.Generator().manual_seed(RANKS * step + net.engine.rank)
        loss = net(torch.randn(2, 5, generator=random).bfloat16()).float().square().mean()
        net.backward(loss, True)
        losses.append(net.engine.total(loss.detach().clone()).item())
        norms.append(net.step().item())
    weights = {name: p.detach().clone() for name, p in net.raw.named_parameters()}
    held = {
        f"{key} {r.name}": (r.start, net.read(r, key).clone())
        for r in net.held()
        for key in net.states
    }
    return losses, norms, weights, held


def the_kernel_adds_in_the_order_of_ranks():
    "More columns than a program has, and what stands behind the result stays as it is."
    count = sum_kernel.ELEMENTS + 100
    for ranks, divisor in ((4, 1.0), (3, 3.0)):
        rows = torch.randn(ranks, count).bfloat16()
        out = torch.ones(count + 1)  # bf16 would be cut off by the interpreter, not rounded
        sum_kernel.launch_sum(rows, out, divisor)
        right = torch.zeros(count)
        for row in rows:
            right += row.float()
        assert torch.equal(out[:count], right / divisor) and out[count] == 1


def main():
    the_kernel_adds_in_the_order_of_ranks()
    whole, *_ = on_ranks(training, RANKS, False)
    ranks = on_ranks(training, RANKS, True)
    for losses, norms, weights, _ in ranks:
        assert losses == whole[0], (losses, whole[0])
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(whole[1]), rtol=1e-6, atol=0)
        assert all(torch.equal(weights[name], values) for name, values in whole[2].items())
    for name, (_, values) in whole[3].items():
        parts = [rank[3][name] for rank in ranks]
        assert sum(len(part) for _, part in parts) == len(values)
        for start, part in parts:
            assert torch.equal(part, values[start : start + len(part)]), name
    empty = sum(not len(part) for rank in ranks for _, part in rank[3].values())
    print(f"fine: {len(whole[3])} tensors; {empty} of {RANKS * len(whole[3])} parts are empty")


if __name__ == "__main__":
    main()
