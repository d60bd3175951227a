"""The plan's own choice of settings: on H100s of 80 GB, against settings by hand, and refused."""

import functools
import json
import random

import pytest
import yaml

from sciftune.core.recipe import Recipe, RecipeError, resolve
from sciftune.core.rundir import RunDir
from sciftune.models.family import get_family
from sciftune.planner.plan import write_plan
from sciftune.planner.profile import profile
from sciftune.planner.rows import Machine, plan_row
from sciftune.planner.search import (
    OFFLOAD_GAIN,
    Setting,
    best_settings,
    check_cards,
    engine_variants,
    open_settings,
    variant,
)
from sciftune.planner.speed import DEVICES

H100 = "NVIDIA H100 80GB HBM3"
OPEN = dict.fromkeys(
    ("strategy", "micro_batch", "shard_states", "offload", "compile", "cuda_graphs"), "auto"
)
COMMON = dict(
    resolution=1024,
    text_tokens=512,
    gradient_checkpointing="auto",
    precision="bf16-master24",
    validation_steps=0,
    model_path="random",
)
SHARDED = {"ddp+shards", "fsdp", "fsdp+gathered"}


@functools.cache
def measured(model):
    """The profile of a model, which every test may use."""
    return profile(resolve(**COMMON | dict(model=model)), get_family(model), vae=False)


def machine(count, device=H100, gib=79.2, host=500.0):
    """A machine that is not here."""
    return Machine(device, gib, host, count, True, False)


def best(model, count, batch, place=None, **fields):
    """The settings chosen for a global batch, best first."""
    recipe = resolve(**COMMON | OPEN | dict(model=model, global_batch=batch) | fields)
    return best_settings(measured(model), recipe, place or machine(count))


@pytest.mark.parametrize(
    ("model", "count", "batch", "expected", "slowest"),
    [
        ("qwenimage", 1, 8, {"single+params", "single+optimizer"}, 5.0),
        pytest.param("qwenimage", 2, 8, {"fsdp"}, 2.7, marks=pytest.mark.slow),
        ("qwenimage", 4, 8, {"fsdp", "ddp+shards"}, 1.3),
        ("qwenimage", 8, 8, {"ddp+shards", "fsdp+gathered"}, 0.75),
        ("klein", 1, 1, {"single"}, 0.5),
        ("klein", 2, 8, {"fsdp", "fsdp+gathered"}, 2.05),
        pytest.param("klein", 4, 8, SHARDED, 0.95, marks=pytest.mark.slow),
        ("klein", 4, 16, SHARDED, 1.95),
        ("klein", 8, 8, {"ddp+shards", "fsdp+gathered"}, 0.5),
    ],
)
def test_settings_chosen_on_h100s(model, count, batch, expected, slowest):
    settings = best(model, count, batch)
    first = settings[0]
    assert first.row.fits and first.row.strategy in expected and first.seconds < slowest
    assert first.strategy.recipe.compile and len(settings) == 6
    assert settings == sorted(settings, key=lambda one: one.rank)
    assert len({one.run for one in settings}) == 6
    if (model, count) == ("qwenimage", 4):
        assert first.row.micro_batch >= 2


@pytest.mark.parametrize("draws", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_no_setting_by_hand_is_planned_faster(draws):
    draw = random.Random(48)
    compared = 0
    for _ in range(draws):
        model, count = draw.choice(("qwenimage", "klein")), draw.choice((1, 2, 3, 4, 8))
        batch = count * draw.choice((1, 2, 4, 6))
        name, rates = draw.choice(sorted(DEVICES.items()))
        place = machine(count, name, rates.size * 1e9 / 2**30, draw.choice((64.0, 250.0, 1000.0)))
        precision = draw.choice(("bf16-master24", "bf16-mixed"))
        fields = dict(precision=precision, global_batch=batch, model=model)
        chosen = best(model, count, batch, place, precision=precision)[0]
        by_hand = resolve(**COMMON | fields | dict(micro_batch=1))
        engines = [e for e in engine_variants(count) if e.get("offload") != "nvme"]  # needs a path
        engines = [dict(engine, micro_batch=b) for engine in engines for b in (1, 2, 4)]
        fitting = []
        for change in draw.sample(engines, len(engines)):
            kind = draw.choice(("auto", "full"))
            change = change | dict(compile=draw.random() < 0.8, gradient_checkpointing=kind)
            strategy = variant(by_hand, count, True, **change)
            if not strategy or strategy.recipe.hybrid_shard or len(fitting) == 5:
                continue
            row = plan_row(measured(model), strategy, place)
            if row.fits and row.precision == precision:
                fitting.append(Setting(strategy, row, row.seconds_per_step, True))
        for other in fitting:
            compared += 1
            told = (model, count, batch, name, other.row.strategy, other.run, chosen.row.strategy)
            assert chosen.row.fits and chosen.rank[1] <= other.rank[1] + 1e-4, told
            assert chosen.seconds <= (1 + 2 * OFFLOAD_GAIN) * other.seconds, told
    assert compared > draws


def test_what_the_recipe_says_is_kept():
    recipe = resolve(**COMMON | OPEN | dict(strategy="ddp", global_batch=8, compile=False))
    settings = list(open_settings(recipe, machine(4)))
    assert {s.recipe.strategy for s in settings} == {"ddp"} and not any(
        s.recipe.compile for s in settings
    )
    hybrid = resolve(**COMMON | OPEN | dict(hybrid_shard=2, num_processes=4))
    assert {s.recipe.hybrid_shard for s in open_settings(hybrid, machine(4))} == {2}
    prefetch = resolve(**COMMON | OPEN | dict(prefetch=2, num_processes=4))
    assert {s.recipe.strategy for s in open_settings(prefetch, machine(4))} == {"fsdp"}
    assert {s.recipe.prefetch for s in open_settings(prefetch, machine(4))} == {2}


def test_a_batch_that_no_card_count_divides_uses_fewer_cards():
    chosen = best("klein", 4, 6)[0]
    assert chosen.strategy.world == 3 and chosen.row.fits


@pytest.mark.parametrize(
    ("fields", "cards", "says"),
    [
        (dict(num_machines=2, main_process_ip="a"), [], "for one machine, not for num_machines=2"),
        (dict(num_processes=16, global_batch=16), [], "at most 8 GPUs"),
        ({}, [("A100", 80.0), ("A100", 40.0)], "equal GPUs, here are 0: A100 (80 GiB), 1: A100 (4"),
        ({}, [("H100", 80.0), ("A100", 80.0)], "name equal ones in CUDA_VISIBLE_DEVICES"),
    ],
)
def test_machines_that_are_refused(fields, cards, says):
    recipe = resolve(**COMMON | OPEN | fields)
    cards = [dict(name=name, memory_gib=gib) for name, gib in cards]
    with pytest.raises(RecipeError, match="^strategy: 'auto'") as refusal:
        check_cards(recipe, cards)
    assert says in str(refusal.value)


def written_plan(tmp_path, **fields):
    """The plan, and the files that a launch would copy into its folder."""
    result = write_plan(resolve(**fields), tmp_path / "plan.json", tmp_path / "run")
    return result, json.loads((tmp_path / "plan.json").read_text())


ELSEWHERE = dict(preset="local", launcher="print", plan_device="H100", host_memory_gib=500)


def test_the_written_recipe_holds_what_was_chosen(tmp_path):
    fields = ELSEWHERE | dict(model="klein", num_processes=4, device_memory_gib=79.2)
    result, plan = written_plan(tmp_path, **fields)
    kept = Recipe.load(RunDir(tmp_path).recipe)
    assert result.run.fits and not kept.open_fields
    assert {name: getattr(kept, name) for name in plan["decided"]} == plan["decided"]
    assert len(plan["choices"]) == 6 and not plan["choices"][0]["why"]
    assert all("slower" in c["why"] or "more" in c["why"] for c in plan["choices"][1:])
    assert f"-p micro_batch {kept.micro_batch}" in plan["choices"][0]["settings"]
    again = yaml.safe_load(RunDir(tmp_path).resumed_recipe.read_text())
    assert (again["auto"], again["micro_batch"]) == ("", kept.micro_batch)
    assert plan["run"]["fits"] and plan["run"]["micro_batch"] == kept.micro_batch


def test_where_nothing_fits_adapters_are_named(tmp_path):
    fields = ELSEWHERE | dict(plan_device="RTX 4090", host_memory_gib=40, model="qwenimage")
    result, plan = written_plan(tmp_path, **fields, num_processes=1, global_batch=1)
    said = result.refusal()
    assert not plan["run"]["fits"]
    assert "adapters of rank 16 instead of all weights" in said and "lora_base" in said


def test_a_cpu_trains_whole_batches_uncompiled(tmp_path):
    fields = dict(model="klein", preset="tiny", cpu=True, global_batch=4)
    result, plan = written_plan(tmp_path, **fields | OPEN)
    assert result.run.fits and not result.suggestions
    expected = dict(strategy="single", micro_batch=4, compile=False, offload="none")
    assert expected.items() <= plan["decided"].items()
