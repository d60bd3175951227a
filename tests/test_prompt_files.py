"""A file of validation prompts, from its lines to what is sampled."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from encoded import cached, recipe_of
from PIL import Image

from sciftune.core.fields import RecipeError
from sciftune.lab import prepare
from sciftune.models.family import get_family
from sciftune.models.references import references_of
from sciftune.training import validation

LINES = """a plot --d 7 --s 3 --l 4 --n blurry
# a comment
another plot --d 7 --s 3 --l 4
wide bars --w 96 --h 32
the last one --l 1
"""


@pytest.fixture
def given(tmp_path):
    (tmp_path / "own").mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "own/a.png")
    (tmp_path / "own/a.txt").write_text("red")
    (tmp_path / "p.txt").write_text(LINES)
    return dict(
        validation_file=str(tmp_path / "p.txt"), validation_images=1, micro_batch=2, global_batch=2
    )


@pytest.mark.parametrize("world", [1, 2])
def test_every_entry_is_drawn_as_it_says(tmp_path, given, monkeypatch, world):
    fields = dict(model="qwenimage", validation_sample_steps=5, validation_guidance=2.0)
    recipe = recipe_of(tmp_path, str(tmp_path / "own"), **fields, **given)
    family, data = get_family("qwenimage"), cached(recipe, tmp_path)
    texts = [text for text, _ in data.prompts]
    assert texts == ["a plot", "another plot", "wide bars", "the last one"]
    assert data.prompt_negatives[0] != data.prompt_negatives[1] == data.negative_key
    seen, latents = {}, {}

    def sample(net, noise, scheduler, conditioning, unconditional, scale):
        shape = tuple(noise.shape[1:])
        seen[shape, len(scheduler.timesteps), scale] = unconditional is not None
        return noise

    stand_in = SimpleNamespace(
        sampling=family.sampling,
        guides=family.guides,
        scheduler=family.scheduler,
        latent_factor=family.latent_factor,
        latent_shape=family.latent_shape,
        collate=family.collate,
        sample=sample,
    )
    monkeypatch.setattr(validation, "write_images", lambda *a: latents.update(a[-1]))
    for group in range(world):
        ranks = dict(group=group, groups=world, place=0, main=not group)
        engine = SimpleNamespace(device=torch.device("cpu"), **ranks)
        net = SimpleNamespace(train=lambda on: None, after_eval=lambda: None)
        validation.sample_images(recipe, stand_in, net, data, engine, tmp_path / "drawn")
    square, wide = family.latent_shape(64, 64), family.latent_shape(32, 96)
    guided = {(square, 3, 4.0): True, (wide, 5, 2.0): True, (square, 5, 1.0): False}
    assert seen == guided
    assert sorted(latents) == [0, 1, 2, 3]
    assert torch.equal(latents[0], latents[1])  # of one seed
    assert latents[2].shape[1:] == wide and not torch.equal(latents[3], latents[0])


def test_an_entry_that_cannot_be_drawn_ends_a_launch_by_its_line(tmp_path, given):
    recipe = recipe_of(tmp_path, str(tmp_path / "own"), **given)
    (tmp_path / "p.txt").write_text("a plot\nbars --w 100 --h 64\n")
    with pytest.raises(RecipeError, match="validation_file: .*p.txt, line 2: width 100 is no mult"):
        prepare._check_prerequisites(recipe)
    both = recipe.model_copy(update=dict(validation_prompts=("a",)))
    with pytest.raises(RecipeError, match="not beside validation_prompts"):
        prepare._check_prerequisites(both)
    with pytest.raises(RecipeError, match="validation_file: needs objective 'epsilon' or 'flow'"):
        recipe_of(tmp_path, str(tmp_path / "own"), model="sd15", objective="dmd2", **given)


@pytest.fixture
def edits(tmp_path, given):
    "An edit set of one pair beside a file of prompts with references of other shapes."
    for name, size in (("a", (64, 64)), ("src", (64, 64)), ("wide", (128, 64)), ("tall", (64, 96))):
        Image.new("RGB", size, "blue").save(tmp_path / f"own/{name}.png")
    line = dict(edited_image="a.png", source_image="src.png", edit_prompt="invert")
    (tmp_path / "own/metadata.jsonl").write_text(json.dumps(line))
    (tmp_path / "p.txt").write_text(
        "invert --ci own/wide.png --n grey\n"
        "both --ci own/tall.png --ci own/wide.png --w 64 --h 64\n"
        "from nothing\n"
    )
    return dict(model="qwenimage_edit", reference_images=2, reference_side=64, **given)


def test_prompts_bring_their_references(tmp_path, edits):
    "Their captions and their negative captions see them, too; a first reference gives the shape."
    recipe = recipe_of(tmp_path, str(tmp_path / "own"), fit="bucket", text_tokens=64, **edits)
    data = cached(recipe, tmp_path)
    assert [len(keys) for keys in data.prompt_references] == [1, 2, 0]
    assert data.prompt_references[0][0] == data.prompt_references[1][1]
    wide, small, square = data.prompt_sizes
    assert wide[1] > wide[0] and small == square == (64, 64)
    lengths = [data.tensors[key]["text"].shape[0] for _, key in data.prompts]
    assert lengths[1] > lengths[0] > lengths[2]
    assert len({*data.prompt_negatives, data.negative_key}) == 3
    assert data.prompt_negatives[2] == data.negative_key
    shown = {p.name for p in (tmp_path / "run/validation_images/references").iterdir()}
    assert shown == {"00-0.png", "01-0.png", "01-1.png"}
    assert not (tmp_path / "run/validation_images/truth").exists()
    family, seen = get_family(recipe.model), []
    net = SimpleNamespace(train=lambda on: None, after_eval=lambda: None)
    ranks = dict(group=0, groups=1, place=0, main=True, device=torch.device("cpu"))

    def sample(self, net, noise, scheduler, conditioning, *rest):
        seen.append((noise.shape[2:], [len(x) for x in references_of(conditioning)]))
        return noise

    with mock.patch.object(type(family), "sample", sample):
        drawn = tmp_path / "drawn"
        validation.sample_images(recipe, family, net, data, SimpleNamespace(**ranks), drawn)
    assert len(seen) == 2 and len(list(drawn.glob("*.png"))) == 3


@pytest.mark.parametrize(
    "line, why",
    [
        ("x --ci own/no.png", "line 1: reference .*own/no.png: No such file"),
        ("x --ci own/metadata.jsonl", "line 1: reference .*metadata.jsonl: "),
        (
            "x" + " --ci own/a.png" * 3,
            "line 1: references: 3, and the recipe says reference_images=2",
        ),
    ],
)
def test_a_reference_that_cannot_be_read_ends_a_launch_by_its_line(tmp_path, edits, line, why):
    recipe = recipe_of(tmp_path, str(tmp_path / "own"), **edits)
    (tmp_path / "p.txt").write_text(line)
    with pytest.raises(RecipeError, match=f"validation_file: .*{why}"):
        prepare._check_prerequisites(recipe)
