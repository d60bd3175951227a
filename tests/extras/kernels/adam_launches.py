"""One launch for many parameters against one launch for each: the same numbers, bit by bit.

    TRITON_INTERPRET=1 python tests/extras/kernels/adam_launches.py

Triton's interpreter runs the kernels on the CPU.
"""

import torch
from torch import nn

from sciftune.extras.kernels.adam import LeanAdamW, Moment
from sciftune.strategies.gradient_release import GradientRelease

# several blocks of the kernel, more than there are programs, a part of a block; sizes that
# go alone; nothing at all, as of an empty shard
SIZES = (32, 1024, 2500, 10240, 7, 1040, 0, 16)


def optimizer(params):
    "It asks for a GPU; the interpreter needs none."
    there = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        return LeanAdamW(params, lr=1e-3, weight_decay=0.1, master_weight_bits=24)
    finally:
        torch.cuda.is_available = there


def parameters(sizes):
    torch.manual_seed(0)
    return [nn.Parameter((torch.randn(n) * 0.02).bfloat16()) for n in sizes]


def tensors(opt, p):
    "The parameter and its states."
    state = opt.state[p]
    moments = [state[k] for k in ("exp_avg", "exp_avg_sq")]
    parts = [t for m in moments for t in (m._quantized, m._scales)]
    return [p.detach(), state["error_bits"], *parts, state["step"]]


def same(one, several, two, alone):
    "Whether two optimizers have made the same parameters and states of their lists."
    return all(
        torch.equal(x, y)
        for p, q in zip(several, alone, strict=True)
        for x, y in zip(tensors(one, p), tensors(two, q), strict=True)
    )


class Twins:
    "The same parameters twice: `several` are updated by one launch, `alone` by one launch each."

    def __init__(self):
        self.several, self.alone = parameters(SIZES), parameters(SIZES)
        self.one, self.two = optimizer(self.several), optimizer(self.alone)
        self.grads = [(torch.randn(n) * 0.01).bfloat16() for n in SIZES]

    def sides(self):
        "Each optimizer with its parameters."
        return (self.one, self.several), (self.two, self.alone)

    def plan(self):
        "The launch for all of them."
        return next(iter(self.one.launches.values()))

    def same(self):
        return same(self.one, self.several, self.two, self.alone)

    def count(self, opt, p):
        "How many steps a parameter has taken."
        return int(opt.state[p]["step"])

    def set_steps(self, number):
        "What reading a checkpoint does."
        for opt, params in self.sides():
            for p in params:
                opt.state[p]["step"] = torch.full_like(opt.state[p]["step"], number)

    def step(self):
        "Together and one by one."
        self.one.step_params(self.several, self.grads, self.one.param_groups[0])
        for p, gradient in zip(self.alone, self.grads, strict=True):
            p.grad = gradient
            self.two.step_param(p, self.two.param_groups[0])
        assert self.same() and torch.equal(self.one.partial, self.two.partial)
        assert torch.equal(self.one.take_squares(), self.two.take_squares())
        assert all(p.grad is None for p in self.several)


def the_table_follows_what_moves(twins):
    "It is sent again when something has moved, and not otherwise."
    twins.step()
    plan, table = twins.plan(), twins.plan().table
    assert plan.fits == [0, 1, 3, 5, 7] and len(plan.rows) == 1 + 1 + 8 + 2 + 1
    assert twins.count(twins.one, twins.several[0]) == 1
    twins.step()
    assert twins.plan() is plan and plan.table is table
    twins.grads[3] = twins.grads[3].clone()
    twins.step()
    assert twins.plan() is plan and plan.table is not table
    table = plan.table
    twins.step()
    assert plan.table is table
    for opt, params in twins.sides():
        state = opt.state[params[1]]
        state["error_bits"] = state["error_bits"] + 1
        state["exp_avg"]._scales = state["exp_avg"]._scales * 2
        params[0].data = params[0].data * 2
    twins.step()
    assert twins.plan() is plan and plan.table is not table


def the_plan_is_made_again_for_other_states(twins):
    plan, first = twins.plan(), twins.several[0]
    twins.set_steps(9)
    twins.step()
    assert twins.plan() is not plan and twins.count(twins.one, first) == 10
    old, new = twins.one.state[first]["exp_avg"], Moment(None)
    new._quantized, new._scales = old._quantized.clone(), old._scales.clone()
    twins.one.state[first]["exp_avg"] = new
    twins.step()


def an_address_that_16_does_not_divide(twins):
    whole = torch.zeros(10256).bfloat16()
    twins.grads[3] = whole[1:10241].copy_(twins.grads[3])
    twins.step()
    assert 3 not in twins.plan().fits


def gradients_in_fp32(twins):
    "Only those that the kernel takes."
    some = [3, 1]
    twins.one.step_params(
        [twins.several[i] for i in some],
        [twins.grads[i].float() for i in some],
        twins.one.param_groups[0],
    )
    for i in some:
        twins.alone[i].grad = twins.grads[i].clone()
        twins.two.step_param(twins.alone[i], twins.two.param_groups[0])
    assert twins.same() and len(twins.one.launches) == 2
    twins.one.take_squares()
    twins.two.take_squares()


def one_that_has_taken_more_steps(twins):
    "They are updated one by one."
    twins.set_steps(9)
    for opt, params in twins.sides():
        opt.state[params[0]]["step"] += 1
    twins.step()
    ahead = twins.count(twins.one, twins.several[0])
    assert ahead == twins.count(twins.one, twins.several[1]) + 1
    assert twins.count(twins.one, twins.several[1]) == twins.count(twins.two, twins.alone[1])


def module():
    "Two blocks, and a layer outside of them."
    torch.manual_seed(0)
    net = nn.Module()
    net.outer = nn.Linear(32, 32)
    net.blocks = nn.ModuleList(
        [
            nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 32))
            for _ in range(2)
        ]
    )
    return net.bfloat16()


def counted(opt):
    "A list that gets the number of parameters of each launch of `opt` for several."
    calls, known = [], opt.step_params

    def step_params(params, grads, group):
        calls.append(len(params))
        known(params, grads, group)

    opt.step_params = step_params
    return calls


def trained(blocks, steps=3):
    "Optimizer, parameters, gradient norms and launches; `blocks` as `GradientRelease` takes it."
    net = module()
    opt = optimizer(list(net.parameters()))
    release = GradientRelease(net, opt, 0.1, blocks)
    calls, norms = counted(opt), []
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(steps):
        y = net.blocks[0](net.outer(x))
        second = net.blocks[1]
        y = second[1](second[0](y))  # its last two layers get no gradient
        (y.float().square().mean() * release.scale).backward()
        norms.append(release.finish())
        assert all(p.grad is None for p in net.parameters())
    return opt, list(net.parameters()), torch.stack(norms), calls


def a_module_by_blocks():
    one, several, norms, calls = trained(None)
    two, alone, expected, none = trained([])
    several = [p for p in several if one.state[p]]
    alone = [p for p in alone if two.state[p]]
    assert same(one, several, two, alone)
    assert torch.equal(norms, expected) and (norms > 0).all(), (norms, expected)
    assert calls == [8, 4, 4, 8, 4, 8] and not none, (calls, none)


def a_step_of_all():
    "As with several micro-batches: bf16 gradients together, others and none as ever."
    twins = Twins()
    twins.grads[3] = twins.grads[3].float()
    twins.grads[5] = None
    calls = counted(twins.one)
    for _ in range(3):
        for opt, params in twins.sides():
            params[3].grad_dtype = None  # any
            for p, gradient in zip(params, twins.grads, strict=True):
                p.grad = gradient if gradient is None else gradient.clone()
            if opt is twins.one:
                opt.step()
            for p in params if opt is twins.two else ():
                opt.step_param(p, opt.param_groups[0])
    several = [p for p in twins.several if twins.one.state[p]]
    alone = [p for p in twins.alone if twins.two.state[p]]
    assert calls == [len(SIZES) - 2] * 3 and len(several) == len(SIZES) - 1
    assert same(twins.one, several, twins.two, alone)
    assert twins.count(twins.one, twins.several[0]) == 3
    loss = twins.one.step(lambda: torch.ones(()))
    assert loss == 1 and len(calls) == 3


if __name__ == "__main__":
    a_step_of_all()
    pair = Twins()
    the_table_follows_what_moves(pair)
    the_plan_is_made_again_for_other_states(pair)
    an_address_that_16_does_not_divide(pair)
    gradients_in_fp32(pair)
    one_that_has_taken_more_steps(pair)
    a_module_by_blocks()
    print("fine")
