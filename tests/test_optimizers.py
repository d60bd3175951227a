"""Every engine trains the optimizer that is asked for, or refuses it by name."""

import itertools
from typing import get_args

import pytest
import torch

from sciftune.core.recipe import Fields, RecipeError, resolve
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


def recipe_of(strategy, offload, precision, rank, **more):
    more |= dict(nvme_path="/tmp") if offload == "nvme" else {}
    processes = 1 if STRATEGIES[strategy].processes == "one" else 2
    return resolve(
        strategy=strategy,
        offload=offload,
        precision=precision,
        lora_rank=rank,
        num_processes=processes,
        micro_batch=1,
        global_batch=processes,
        **more,
    )


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


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_engine_builds_it(strategy, optimizer):
    "On a CPU; what is built is what the policy says."
    from sciftune.strategies.ranks import on_ranks

    torch.set_num_threads(1)
    world = 1 if STRATEGIES[strategy].processes == "one" else 2
    fields = dict(strategy=strategy, optimizer=optimizer, precision="bf16-mixed")
    name = records("optimizers")[optimizer].implementation
    assert on_ranks(built, world, fields | dict(num_processes=world)) == [name] * world


def built(fields):
    "Class of the optimizer of a network."
    from sciftune.strategies.ranks import toy_engine, toy_module

    network = toy_engine(**fields).network(toy_module())
    return type(network.optimizer).__name__
