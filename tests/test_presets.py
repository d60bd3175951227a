"""Presets of reference systems have their values or say why not; presets of tasks fit families."""

import os
import re
import warnings

import pytest
from forked import train
from PIL import Image

from sciftune.core.presets import preset_files, preset_named, preset_values, presets
from sciftune.core.recipe import Recipe, RecipeError, resolve
from sciftune.core.recipe_fields import Fields
from sciftune.core.registry import records
from sciftune.core.rundir import RunDir
from sciftune.data import sources
from sciftune.lab.jobs import LaunchError
from sciftune.lab.prepare import recipe_from
from sciftune.project.pages import reference_rows

FOLLOWING = [name for name, preset in preset_files().items() if preset.reference]


def differences(name):
    "Settings of the reference that the resolved recipe does not have, and those that no field is."
    preset = preset_files()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a preset is written in fields
        recipe = resolve(model=preset.models[0], preset=name)
    fields = preset.reference.keys() & Fields.model_fields.keys()
    other = {field for field in fields if getattr(recipe, field) != preset.reference[field]}
    return other | (preset.reference.keys() - fields)


def test_every_system_has_its_reference():
    earlier = {name for preset in preset_files().values() for name in preset.also}
    systems = {name for name in earlier if name.startswith("system_")}
    assert systems
    assert {preset_named(name) for name in systems} == set(FOLLOWING)


def test_an_earlier_name_means_the_same_values():
    for name, preset in preset_files().items():
        for earlier in preset.also:
            model = preset.models[0]
            assert preset_values(model, earlier) == preset_values(model, name)
            assert resolve(model=model, preset=earlier).preset == name


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_value_is_the_reference_s_or_says_why_not(name):
    preset = preset_files()[name]
    assert differences(name) == preset.reasons.keys()
    assert all(len(why) > 20 for why in preset.reasons.values())


@pytest.mark.parametrize("name", FOLLOWING)
def test_the_page_shows_both(name):
    head, *rows = reference_rows(name)
    assert head[1:3] == ["reference", "here"]
    assert [row[0].strip("`") for row in rows] == list(preset_files()[name].reference)


def test_values_that_were_others():
    for way in ("ddp", "zero2", "zero3", "fsdp"):
        recipe = resolve(model="flux1", preset=f"flux1_lora_{way}")
        assert (recipe.num_train_epochs, recipe.checkpoint_steps, recipe.warmup_steps) == (
            100,
            50,
            0,
        )
    assert resolve(model="sd15", preset="sd_dmd2_decoupled").reshard is True


TASKS = [name for name, preset in preset_files().items() if preset.rules]


def folder_of(pictures, place, edits=False):
    """A folder of pictures with captions; of edits every one with the picture before it."""
    place.mkdir()
    for i in range(pictures):
        picture = Image.new("RGB", (80, 64 if i % 2 else 80), (6 * i % 256, 90, 200))
        picture.save(place / f"{i}.png")
        if edits:
            picture.rotate(180).save(place / f"{i}.source.png")
        (place / f"{i}.txt").write_text(f"shade {i}")
    return str(place)


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    return folder_of(40, tmp_path_factory.mktemp("data") / "forty")


def test_there_are_five_tasks():
    assert TASKS == ["distil", "edit", "full", "lora", "lora_style"]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_needs_a_model_and_a_folder_or_says_which_models_can(task, forty):
    able = [model for model in records("models") if task in presets(model)]
    for model in records("models"):
        given = dict(model=model, preset=task, data=forty)
        if model not in able:
            with pytest.raises(LaunchError, match=re.escape(f"it is for {', '.join(able)}")):
                recipe_from(given)
            continue
        recipe = recipe_from(given)
        assert recipe.model_path == records("models")[model].hub
        assert set(preset_files()[task].rules) <= recipe.reasons.keys()
        assert 0 < recipe.warmup_steps <= recipe.validation_steps < recipe.steps
        assert recipe.checkpoint_steps < recipe.steps
        assert Recipe.load(recipe.save(f"{forty}/../recipe.yaml")).model_dump() == dict(recipe)


@pytest.mark.parametrize("pictures", [1, 3, 40, 700])
def test_values_follow_the_pictures_and_what_is_given(pictures, tmp_path):
    place = folder_of(pictures, tmp_path / "some")
    recipe = recipe_from(dict(model="klein", preset="lora", data=place))
    assert recipe.steps == min(max(round(100 * pictures / 8), 300), 4000)
    assert recipe.held_out == min(max(round(0.1 * pictures), 2), 64, pictures // 4)
    assert recipe.keep_best == ("held_out" if recipe.held_out else "")
    assert ("keep_best: ''  # none of" in recipe.yaml()) == (not recipe.held_out)
    assert f"{pictures} pictures" in recipe.reasons["steps"]
    assert f"steps: {recipe.steps}  # 100 passes over {pictures} pictures" in recipe.yaml()
    own = recipe_from(dict(model="klein", preset="lora", data=place, steps=1000, lora_rank=4))
    assert (own.steps, own.lora_rank, own.checkpoint_steps) == (1000, 4, 200)
    assert not {"steps", "lora_rank"} & own.reasons.keys()
    if "figures" in records("collections"):  # drawn, 512 by default
        assert recipe_from(dict(model="klein", preset="lora", data="figures")).held_out == 51


ODD = (0, -1, "abc", "20", "1e3", "auto", "", True, [3], float("nan"), float("inf"), 1e30, "8")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("field", ["global_batch", "num_train_epochs", "steps", "held_out"])
def test_an_odd_value_is_coerced_or_refused_before_rules_use_it(task, field):
    model = next(model for model in records("models") if task in presets(model))
    for value in ODD:
        try:
            recipe = resolve(model=model, preset=task, **{field: value})
        except RecipeError as error:
            assert f"{field}: " in str(error)
        else:
            assert type(getattr(recipe, field)) in (int, float)
    assert resolve(model=model, preset=task, steps="200").warmup_steps <= 100


def test_an_unknown_number_of_pictures_is_said_and_captions_are_counted(tmp_path):
    given = dict(model="sd15", preset="distil", data="https://example.org/a.tar")
    assert "1000 assumed: give steps" in recipe_from(given).reasons["steps"]
    captions = tmp_path / "captions.txt"
    captions.write_text("a line\n" * 250)
    recipe = recipe_from(given | dict(prompts=str(captions)))
    assert (recipe.steps, recipe.reasons["steps"][:18]) == (5000, "20 of 250 pictures")


def test_a_folder_is_listed_once_until_it_changes(tmp_path, monkeypatch):
    listed = []
    find = sources.find_source
    monkeypatch.setattr(sources, "find_source", lambda *a: listed.append(a) or find(*a))
    given = dict(model="klein", preset="lora", data=folder_of(30, tmp_path / "some"))
    assert [recipe_from(given | dict(seed=seed)).held_out for seed in (1, 2)] == [3, 3]
    assert len(listed) == 1
    for i in range(10):
        (tmp_path / f"some/{30 + i}.png").write_bytes((tmp_path / "some/0.png").read_bytes())
    os.utime(tmp_path / "some", (1, 1))
    assert recipe_from(given).held_out == 4


@pytest.mark.parametrize("model,task", [("qwenimage", "lora"), ("klein", "edit"), ("sd15", "full")])
def test_a_task_trains_forty_pictures(model, task, tmp_path):
    forty = folder_of(40, tmp_path / "forty", edits=task == "edit")
    few = dict(steps=3, model_path="tiny", resolution=64, cpu=True, strategy="single")
    few |= dict(global_batch=2, micro_batch=2, validation_images=1, validation_sample_steps=1)
    few |= dict(compile=False, offload="none", shard_states=False, cuda_graphs=False)
    recipe = recipe_from(dict(model=model, preset=task, data=forty) | few)
    rules = {name: getattr(recipe, name) for name in preset_files()[task].rules}
    rules |= dict(validation_steps=2, checkpoint_steps=2, warmup_steps=1)
    run = RunDir(tmp_path / "run")
    metrics = train(run, model=model, preset=task, data=forty, **few | rules)
    assert max(row["step"] for row in metrics) == 3
    assert any("held_out" in row for row in metrics)
    assert (run.model / "README.md").exists()
