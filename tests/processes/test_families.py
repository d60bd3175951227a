"""Every family by itself: planned, trained by engines, resumed, exported and read again.

The families are those of the registry: a new one is tested without a line here. Two settings cover
both types of numbers, whole weights and adapters, one size and buckets. Every family trains and
exports both in one process; with an engine that shards, one family trains its weights, and the next
its adapters. All engines with all families: pytest -m slow tests/processes/test_families.py
"""

import json
import os

import numpy as np
import pytest
import torch
from exported import check_types, load_exported, predicted, trained_network
from forked import ENGINES, deviation, losses, recipe_of, train
from PIL import Image

from sciftune.core.checkpoint_folders import find_checkpoint
from sciftune.core.recipe import Recipe
from sciftune.core.registry import find_record, records
from sciftune.core.rundir import RunDir
from sciftune.models.family import get_family
from sciftune.planner.plan import plan
from sciftune.planner.profile import planned_weights, weights_path
from sciftune.training.task import Export

ALIKE = 1e-6  # engines in fp32
ROUNDED = 2e-3  # engines that round to bf16 in other places
CLOSE = 1e-4  # the trained network and what its export opens as
SHAPES = [(96, 64), (64, 112), (80, 80), (130, 70), (70, 90)]
BASE = dict(
    text_tokens=16,
    held_out=2,
    steps=2,
    micro_batch=1,
    global_batch=2,
    learning_rate=1e-3,
    lr_schedule="constant",
    validation_steps=0,
    checkpoint_steps=0,
    export=False,
)
SAVED = dict(checkpoint_steps=1, checkpoints_kept=9, export=True)
SEEN = dict(validation_steps=2, validation_images=1, validation_sample_steps=2)
SEQUENCES = dict(  # of text and images, in the place of captioned images
    figures=16,
    expected_tokens=320,
    max_tokens=400,
    max_sample_tokens=400,
    vit_resolution=112,
)
WHOLE = dict(precision="fp32")
SETTINGS = dict(whole=WHOLE, adapters=dict(precision="bf16-mixed", lora_rank=4, lora_alpha=2))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Images of several shapes with captions, and the same as edits of other images."""
    root, draws = tmp_path_factory.mktemp("families"), np.random.default_rng(0)
    lines = []
    for i in range(8):
        for name in (f"{i}.png", f"{i}-before.png"):
            width, height = SHAPES[(i + len(lines)) % len(SHAPES)]
            pixels = draws.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name)
        lines.append(dict(file_name=f"{i}.png", text=f"figure {i}"))
    edits = [line | dict(source_image=f"{i}-before.png") for i, line in enumerate(lines)]
    for name, rows in (("plain", lines), ("edits", edits)):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def fields(root, model, change):
    """Those of a run of seconds, as far as the family has them."""
    record, family = find_record("models", model), get_family(model)
    values = BASE | dict(model=model, resolution=64) | change
    if find_record("objectives", record.objectives[0]).sequences:
        unread = {"held_out", *SEEN} - {"validation_steps"}
        kept = {name: value for name, value in values.items() if name not in unread}
        return kept | SEQUENCES | dict(validation_steps=0)
    values |= dict(data=str(root), metadata=str(root / "plain.jsonl"))
    if record.references:
        values |= dict(metadata=str(root / "edits.jsonl"), reference_images=1, reference_side=64)
    if values.get("lora_rank"):
        values |= dict(fit="bucket", bucket_step=max(16, family.size_multiple))
    return values


@pytest.fixture(scope="module")
def trained(root):
    """A run of a family under an engine: its folder and metrics; that of one process is kept."""
    made = {}

    def get(model, setting, engine="single", **more):
        key = model, setting, engine
        if key not in made:
            run = RunDir(root / "runs" / "-".join(key))
            change = SETTINGS[setting] | ENGINES[engine] | more
            if engine == "single":
                change |= SAVED | (SEEN if setting == "whole" else {})
            made[key] = run, train(run, **fields(root, model, change))
        return made[key]

    return get


def stand_ins():
    """A family of each stand-in: families of one class differ in size alone."""
    names = {}
    for name in records("models"):
        family = get_family(name)
        names.setdefault((type(family).build_tiny, str(family.tiny_config)), name)
    return list(names.values())


def halfway(run):
    """The checkpoint after its first step."""
    return str(run.checkpoints / "step_000001")


def pictures(run):
    """Those of the last validation."""
    files = sorted((run.validation_images / "step_000002").glob("*.png"))
    return [np.asarray(Image.open(file), int) for file in files]


def held_out(rows):
    """The losses of what is not trained on."""
    return {row["step"]: row["held_out"] for row in rows if row.get("held_out", 0) > 0}


@pytest.mark.slow  # as the published ones are
@pytest.mark.parametrize("model", stand_ins())
def test_it_is_planned(root, model):
    recipe = recipe_of(RunDir(root / "runs" / "plan"), **fields(root, model, WHOLE))
    planned, family = plan(recipe), get_family(model)
    base = family.empty_denoiser(weights_path(recipe, family))
    assert planned.parameters == parameters(base)
    assert planned.run.fits and len(planned.rows) > 3


def no_places(size, grid, **options):
    """A table of places, without numbers."""
    return torch.zeros(1, 1).expand(grid * grid, size)


def published(root, monkeypatch, model):
    """A recipe of published weights, without a hub that could be asked for them."""
    monkeypatch.setattr("sciftune.models.weights.fetch", None)
    # SD3's table of 384 x 384 places: a plan has no use for its numbers
    monkeypatch.setattr("diffusers.models.embeddings.get_2d_sincos_pos_embed", no_places)
    run = RunDir(root / "runs" / "published")
    values = dict(model=model, preset="local", cpu=False, launcher="print", plan_device="H200")
    return recipe_of(run, **values, strategy="single", num_processes=1)


def parameters(network):
    """How many a network has."""
    return sum(p.numel() for p in network.parameters())


def planned_always():
    """The last family of each network, which has most parts: the others differ in size."""
    return {get_family(name).denoiser_class: name for name in records("models")}.values()


@pytest.mark.parametrize("model", records("models"))
def test_what_is_published_is_planned_without_the_hub(root, monkeypatch, model):
    recipe, family = published(root, monkeypatch, model), get_family(model)
    assert recipe.model_path == find_record("models", model).hub
    count = parameters(family.empty_denoiser())
    assert count > 8e8
    with planned_weights(recipe, family) as folder:
        if family.text_components:
            assert family.text_numel(folder) > 1e8
    if model in planned_always() or os.environ.get("SCIFTUNE_SLOW"):
        assert plan(recipe).parameters == count


def with_engines(chosen, *engines):
    """Families with engines: `chosen(place, family)` for a start, the others where time is."""
    for place, name in enumerate(stand_ins()):
        for engine in engines:
            marks = () if engine == chosen(place, name) else pytest.mark.slow
            yield pytest.param(name, engine, marks=marks)


def is_unet(name):
    """Whether a family's network has convolutions."""
    return find_record("models", name).objectives[0] == "epsilon"


def sharded(place, name):
    """ZeRO-3, or FSDP that goes on where one process stopped, for every second family.

    Of U-Nets the first, with DDP: test_distill.py trains them with FSDP, and ZeRO-3 takes long.
    """
    if is_unet(name):
        return "ddp" if name == next(filter(is_unet, stand_ins())) else ""
    return "" if place % 2 else ("zero3", "fsdp")[place // 2 % 2]


def sharded_adapters(place, name):
    """The same for the families between; of U-Nets none, whose bf16 is slow on a CPU."""
    return "" if is_unet(name) else sharded(place + 1, name)


@pytest.mark.parametrize("model, engine", list(with_engines(sharded, "ddp", "zero3", "fsdp")))
def test_an_engine_trains_its_weights_alike(root, trained, model, engine):
    """In losses, gradients, held-out losses and pictures; FSDP goes on where another stopped."""
    run, one = trained(model, "whole")
    objective = find_record("objectives", find_record("models", model).objectives[0])
    seen = not objective.sequences  # whose pictures take long
    assert set(losses(one)) == {1, 2}
    assert bool(pictures(run)) == bool(held_out(one)) == seen
    looked = {} if is_unet(model) else SEEN  # ZeRO-3 takes long with a U-Net
    more = dict(ddp={}, zero3=looked, fsdp=SEEN | dict(resume=halfway(run)))[engine]
    other, rows = trained(model, "whole", engine, num_processes=2, **more)
    assert set(losses(rows)) == ({2} if "resume" in more else {1, 2})
    assert deviation(rows, one) <= ALIKE and deviation(rows, one, "grad_norm") <= 1e-5
    if more and seen:
        assert held_out(rows)[2] == pytest.approx(held_out(one)[2], rel=ALIKE)
        for a, b in zip(pictures(other), pictures(run), strict=True):
            assert abs(a - b).max() <= 2


@pytest.mark.parametrize("model, engine", list(with_engines(sharded_adapters, "fsdp", "zero3")))
def test_an_engine_trains_its_adapters_in_mixed_precision(root, trained, model, engine):
    """On images in buckets, within what rounding to bf16 moves, from a checkpoint of another."""
    run, one = trained(model, "adapters")
    assert set(losses(one)) == {1, 2}
    _, rows = trained(model, "adapters", engine, num_processes=2, resume=halfway(run))
    assert set(losses(rows)) == {2}
    assert deviation(rows, one) <= ROUNDED and deviation(rows, one, "grad_norm") <= 2e-2


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", stand_ins())
def test_what_it_exports_is_what_was_trained(root, trained, model, setting):
    run, _ = trained(model, setting)
    export = Export(find_checkpoint(run, "latest"), run.model, Recipe.load(run.recipe))
    network, opened = trained_network(export, "denoiser"), load_exported(export, run.model)
    check_types(export, network, run.model)
    if setting == "whole":
        for tensor in network.state_dict().values():
            tensor.copy_(tensor.bfloat16())  # the type of the exported file
    wanted, found = (predicted(export.family, export.base(), n) for n in (network, opened))
    assert (found - wanted).abs().max() <= CLOSE
