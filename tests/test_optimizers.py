"""Every engine trains the optimizer that is asked for, or refuses it by name."""

import functools
import itertools
from typing import get_args

import pytest
import torch

from sciftune.core.recipe import RecipeError, resolve
from sciftune.core.recipe_fields import Fields
from sciftune.core.registry import records
from sciftune.strategies.precision import POLICIES
from sciftune.strategies.strategy import Strategy

STRATEGIES = records("strategies")
ASKED = get_args(Fields.model_fields["optimizer"].annotation)
SETTINGS = [
    (strategy, offload, precision, rank)
    for strategy, record in STRATEGIES.items()
    for offload in ("none", *record.offloads)
    for precision, rank in itertools.product(POLICIES, (0, 4))
]


@functools.cache
def resolved(strategy, offload, precision, rank, **more):
    "The recipe of a setting, or the error that refuses it."
    more |= dict(nvme_path="/tmp") if offload == "nvme" else {}
    processes = 1 if STRATEGIES[strategy].processes == "one" else 2
    more |= dict(num_processes=processes, micro_batch=1, global_batch=processes)
    engine = dict(strategy=strategy, offload=offload)
    try:
        return resolve(precision=precision, lora_rank=rank, **engine, **more)
    except RecipeError as error:
        return error


def recipe_of(*setting, **more):
    "The recipe of a setting; raises RecipeError."
    recipe = resolved(*setting, **more)
    if isinstance(recipe, RecipeError):
        raise recipe
    return recipe


@pytest.mark.parametrize("optimizer", ASKED)
@pytest.mark.parametrize("cuda", [True, False])
def test_trained_or_refused_by_name(optimizer, cuda):
    trained = set()
    for setting in SETTINGS:
        try:
            recipe = recipe_of(*setting, optimizer=optimizer)
            strategy = Strategy.of(recipe, recipe.num_processes, cuda)
        except RecipeError as error:
            other = str(error).startswith("precision: 'fp8'")
            assert other or str(error).startswith(f"optimizer: '{optimizer}'"), (setting, error)
            assert other or optimizer != "auto", setting
            continue
        trained.add(strategy.policy.optimizer)
        assert optimizer in ("auto", strategy.policy.optimizer), setting
    usual = {policy.optimizer for policy in POLICIES.values()}
    able = {name for name, record in records("optimizers").items() if cuda or not record.gpu_only}
    assert trained == able & (usual if optimizer == "auto" else {optimizer})


def test_a_recipe_alone_refuses_what_no_gpu_could():
    "Nothing that a GPU's engine refuses waits for the engine."
    for setting in SETTINGS:
        for optimizer in ASKED:
            try:
                recipe = recipe_of(*setting, optimizer=optimizer)
            except RecipeError:
                continue
            if recipe.precision != "fp8":
                Strategy.of(recipe, recipe.num_processes, True)


CUT = [name for name, record in records("optimizers").items() if record.scope != "weight"]


@pytest.mark.parametrize("optimizer", CUT)
def test_a_plan_leaves_out_what_is_refused(optimizer):
    "A plan changes the strategy of a recipe without checking it again."
    for setting in SETTINGS:
        try:
            usual = recipe_of(*setting)
        except RecipeError:
            continue
        try:
            recipe_of(*setting, optimizer=optimizer)
            refused = False
        except RecipeError:
            refused = True
        changed = usual.model_copy(update=dict(optimizer=optimizer))
        try:
            Strategy.of(changed, usual.num_processes, True)
            assert not refused, setting
        except RecipeError as error:
            assert refused or str(error).startswith("precision: 'fp8'"), setting


def one_step(net, step):
    "Train on this rank's micro-batches; the losses."
    from sciftune.project.ranks import toy_loss

    engine, losses = net.engine, []
    for i in range(engine.accumulation):
        loss = toy_loss(net, step, i * engine.world + engine.rank)
        net.backward(loss, last=i == engine.accumulation - 1)
        losses.append(loss.item())
    net.step()
    return losses


def trained_and_resumed(fields):
    "Losses of five steps by rate and group; the same with all restored in another network after 3."
    from sciftune.project.ranks import toy_engine, toy_module
    from sciftune.training.ema import OptimizerAverage
    from sciftune.training.updates import UpdateMeter

    net, losses = toy_engine(**fields).network(toy_module()), []
    meter = UpdateMeter(net)
    for step in range(5):
        net.set_rate(fields["learning_rate"] * (1 - 0.1 * step))
        if step == 3:
            stored = {(r, k): net.read(r, k).clone() for r, k in pieces(net, owned=False)}
            kept = net.numbers, net.steps
            meter.before()
        losses.append(one_step(net, step))
        if step == 3:
            measured = meter.after()
    other, again = toy_engine(**fields).network(toy_module()), []
    for (r, key), values in stored.items():
        other.write(r, key, values)
    other.finish_write(kept[1])
    other.numbers = kept[0]
    for step in (3, 4):
        other.set_rate(fields["learning_rate"] * (1 - 0.1 * step))
        again.append(one_step(other, step))
    counted = {}  # what all ranks write: each number once
    for r, key in pieces(net, owned=True):
        counted[key, r.name] = (r.total, net.engine.total(torch.tensor([r.count])).item())
    assert all(total == count for total, count in counted.values()), counted
    average = {}
    if net.policy.optimizer_record.averages:
        average = {name: OptimizerAverage(net).gathered(r) for name, r in by_name(net).items()}
    held = {r.name: (r.start, net.read(r, "weight").clone()) for r in net.held()}
    numbers = {k: measured[k] for k in ("changed", "ratio")}
    resumed = (losses[3:], again)
    return dict(losses=losses, resumed=resumed, held=held, average=average, meter=numbers)


def by_name(net):
    return {r.name: r for r in net.held()}


def pieces(net, owned):
    "Ranges of a checkpoint that this rank writes, or reads."
    parts = net.owned() if owned else net.held()
    return [(net.stored(r, key, owned), key) for r in parts for key in net.states]


GROUPS = "{linear.weight: 0.5, '2': {rate: 2, warmup_steps: 3, weight_decay: 0}}"


@pytest.mark.parametrize(
    "optimizer", [name for name in ASKED if name not in ("auto", "flashadamw")]
)
def test_engines_resumes_and_meter(optimizer):
    "Under each engine that is not refused: the weights of one process, and an exact resume."
    from sciftune.project.ranks import joined, on_ranks

    torch.set_num_threads(1)
    record = records("optimizers")[optimizer]
    rate = 1.0 if record.scope == "model" else 0.02
    groups = "" if record.scope == "model" else GROUPS
    usual = dict(optimizer=optimizer, learning_rate=rate, lr_groups=groups, weight_decay=0.1)
    (alone,) = on_ranks(trained_and_resumed, 1, usual)
    assert alone["meter"]["changed"] > 0.9 and abs(alone["meter"]["ratio"] - 1) < 0.01
    engines = []
    for strategy in ("ddp", "fsdp", "zero2", "zero3"):
        fields = usual | dict(strategy=strategy, num_processes=2)
        try:
            resolve(**fields)
        except RecipeError as error:
            assert str(error).startswith(f"optimizer: '{optimizer}'"), error
            continue
        engines.append(strategy)
        ranks = on_ranks(trained_and_resumed, 2, fields)
        for name, (_, values) in alone["held"].items():
            assert torch.allclose(joined(ranks, name), values, atol=1e-6), (strategy, name)
        for name, values in alone["average"].items():
            assert torch.allclose(ranks[0]["average"][name], values, atol=1e-6), (strategy, name)
        for rank in (alone, *ranks):
            assert rank["resumed"][0] == rank["resumed"][1], strategy
    cut = dict(weight=["ddp", "fsdp", "zero2", "zero3"], step=["ddp", "fsdp"])
    assert engines == cut.get(record.scope, ["ddp"])


@pytest.mark.parametrize("optimizer", [n for n, r in records("optimizers").items() if r.rounds])
def test_bf16_weights_follow_fp32(optimizer):
    """Updates during backward of bf16 weights, rounded stochastically.

    On one process and on two the weights go the way of fp32, and a resume is exact.
    """
    from sciftune.project.ranks import on_ranks

    torch.set_num_threads(1)
    small = dict(optimizer=optimizer, learning_rate=2e-4, weight_decay=0, max_grad_norm=0)
    small |= dict(micro_batch=8)
    (exact,) = on_ranks(way, 1, small | dict(precision="fp32"))
    (alone,) = on_ranks(way, 1, small | dict(precision="bf16"))
    two = dict(strategy="ddp", num_processes=2, micro_batch=4, precision="bf16")
    for case in (alone, *on_ranks(way, 2, small | two)):
        assert case["resumed"]
        assert 0.5 < case["way"] @ exact["way"] / exact["way"].square().sum() < 1.5
        assert 0.6 < case["ratio"] < 1.4 and (case["stochastic"], case["releases"]) == (True, True)


def way(fields):
    "How far 40 steps on wide layers bring their weights, and whether a resume is exact."
    from sciftune.project.ranks import toy_engine
    from sciftune.training.updates import UpdateMeter

    def fresh():
        torch.manual_seed(0)
        wide = [torch.nn.Linear(64, 64) for _ in range(2)]  # 4096 weights: torchao quantises
        engine = toy_engine(**fields)
        return engine.network(torch.nn.Sequential(*wide).to(engine.policy.weights))

    def steps(net, first, last):
        for step in range(first, last):
            torch.manual_seed(100 * step + net.engine.rank)
            inputs = torch.randn(8, 64, dtype=net.policy.weights)
            net.backward(net(inputs).float().square().mean(), last=True)
            net.step()

    def weights(net):
        return torch.cat([net.read(r, "weight").clone() for r in net.held()])

    net = fresh()
    start, meter = weights(net), UpdateMeter(net, sample=10_000)
    steps(net, 0, 20)
    stored = {(r, k): net.read(r, k).clone() for r, k in pieces(net, owned=False)}
    meter.before()
    steps(net, 20, 21)
    measured = meter.after()
    steps(net, 21, 40)
    other = fresh()
    for (r, key), values in stored.items():
        other.write(r, key, values)
    other.finish_write(20)
    other.clip = net.clip
    steps(other, 20, 40)
    return dict(
        way=weights(net) - start,
        resumed=torch.equal(weights(net), weights(other)),
        ratio=measured["ratio"],
        stochastic=measured.get("stochastic", False),
        releases=net.strategy.releases_gradients,
    )


def test_compiled_calls_update_as_each_alone(monkeypatch):
    """Adafactor's compiled calls take whole graphs, few of them, and pairs of one shape.

    During backward the weights are those of updates one by one, and so is the norm.
    """
    from torch._dynamo.utils import counters

    from sciftune.strategies.gradient_release import GradientRelease
    from sciftune.strategies.optim.adafactor import Adafactor

    def trained(joins):
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))) for _ in range(3)
        )
        module = torch.nn.Module()
        module.first, module.blocks = torch.nn.Linear(12, 16), blocks
        module.to(torch.bfloat16)
        monkeypatch.setattr(Adafactor, "joins", lambda self, device: joins)
        optimizer = Adafactor.build(list(module.parameters()), resolve(learning_rate=0.01), False)
        release, norms = GradientRelease(module, optimizer, 1.0, list(blocks)), []
        for _ in range(3):
            hidden = module.first(torch.randn(4, 12, dtype=torch.bfloat16))
            for block in blocks:
                hidden = block(hidden)
            (hidden.float().square().mean() * release.scale).backward()
            norms.append(release.finish())
        return torch.stack(norms), torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    norms, alone = trained(joins=False)
    graphs = counters["stats"]["unique_graphs"]
    traced = {}

    def fused(self, function, parameter):
        options = dict(dynamic=True, fullgraph=True, backend="eager")
        return traced.setdefault(function, torch.compile(function, **options))

    monkeypatch.setattr(Adafactor, "fused", fused)
    same, together = trained(joins=True)
    assert torch.equal(alone, together) and torch.allclose(norms, same, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] - graphs <= 5  # (one, pair) of (vector, matrix, ...)
