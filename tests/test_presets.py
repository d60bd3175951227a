"""A preset that follows a reference system has its values, or says why not."""

import warnings

import pytest

from sciftune.core.presets import preset_files, preset_named, preset_values
from sciftune.core.recipe import resolve
from sciftune.core.recipe_fields import Fields
from sciftune.lab.tables import reference_rows

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
