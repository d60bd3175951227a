"""Which caption an epoch draws, and how often an image is trained on."""

import collections
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoded import cached, recipe_of
from PIL import Image

from sciftune.core.recipe import RecipeError, resolve
from sciftune.data.images import DataError
from sciftune.data.sources import open_collection
from sciftune.data.splits import open_recipe_data
from sciftune.models.family import get_family
from sciftune.objectives.common.batches import LatentBatches
from sciftune.training.encoding import training_samples


def picture(path, seed=0):
    path.parent.mkdir(exist_ok=True, parents=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


CAPTIONS = [dict(text="often", weight=3), "rarely"]


def test_captions_are_drawn_by_their_weights(tmp_path):
    data = picture(tmp_path / "list/a.png")
    line = dict(file_name="a.png", captions=CAPTIONS)
    (tmp_path / "list/metadata.jsonl").write_text(json.dumps(line))
    rows = [
        dict(image=data, captions=[dict(text="often", weight=3), dict(text="rarely", weight=1)])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (tmp_path / "list", tmp_path / "a.parquet"):
        assert list(open_collection(path).captions) == [("often",) * 3 + ("rarely",)]
    recipe = recipe_of(tmp_path, str(tmp_path / "list"), caption_dropout=0)
    found = cached(recipe, tmp_path)
    (sample,) = found.train
    batches = LatentBatches(recipe, None, found.train, found.tensors, found.negative_key)
    drawn = collections.Counter(batches.caption(sample, epoch) for epoch in range(2000))
    assert abs(drawn[sample.caption_keys[0]] / 2000 - 0.75) < 0.03 and len(drawn) == 2


@pytest.mark.parametrize("weight", [0, -1, 101, 1.5, True, "2", None])
def test_a_weight_that_is_none_is_named(tmp_path, weight):
    picture(tmp_path / "a.png")
    line = dict(file_name="a.png", captions=[dict(text="often", weight=weight)])
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError, match="of weight .*: expected a whole number from 1 to 100"):
        open_collection(tmp_path)


@pytest.fixture
def folders(tmp_path):
    "Folders as kohya names them: 6 images of which a pass has 3 + 2 x 3 + 4."
    for i, name in enumerate(("3_sks dog", "2_cat", "2_cat", "2_cat", "plain", "plain")):
        picture(tmp_path / "own" / name / f"{i}.png", i)
    return str(tmp_path / "own")


PASS = {"0": 3, "1": 2, "2": 2, "3": 2, "4": 1, "5": 1}


@pytest.mark.parametrize("fit", ["crop", "bucket"])
def test_a_pass_has_each_image_as_often_as_its_folder_says(tmp_path, folders, fit):
    fields = dict(prompt="a {folder}", folder_repeats=True, fit=fit)
    recipe = recipe_of(tmp_path, folders, **fields)
    assert open_recipe_data(recipe).captions[0] == ("a cat",)
    data, family = cached(recipe, tmp_path), get_family(recipe.model)
    batches = LatentBatches(recipe, family, data.train, data.tensors, data.negative_key)
    seen = [batch for step in range(sum(PASS.values())) for batch in batches(step)]
    names = [name for batch in seen for name in batch["ids"]]
    counts = collections.Counter(name.rpartition("/")[2].partition(".")[0] for name in names)
    assert counts == PASS and len(set(names)) == len(names)
    noises = {batch["noise"].sum().item() for batch in seen}
    assert len(noises) == len(names)  # a repeat has noise of its own
    planned = [sample.id for sample in training_samples(recipe, family)]
    assert planned == [sample.id for sample in data.train]
    plain = recipe_of(tmp_path, folders, prompt="a")
    assert len(cached(plain, tmp_path).train) == 6


def test_repeats_that_cannot_be_meant_are_refused(tmp_path, folders):
    (tmp_path / "own/3_sks dog").rename(tmp_path / "own/2024_dog")
    with pytest.raises(RecipeError, match="2024_dog/0.png would count 2024 times"):
        cached(recipe_of(tmp_path, folders, prompt="a", folder_repeats=True), tmp_path)
    picture(tmp_path / "other/a.png")
    with pytest.raises(RecipeError, match="folder_repeats: no folder of data is called as 10_name"):
        recipe = recipe_of(tmp_path, str(tmp_path / "other"), prompt="a", folder_repeats=True)
        cached(recipe, tmp_path)
    with pytest.raises(RecipeError, match="tags_kept: needs tag_orders"):
        resolve(tags_kept=3)
    (tmp_path / "p.txt").write_text("b")
    with pytest.raises(DataError, match="prompt and prompts both give captions"):
        open_recipe_data(recipe_of(tmp_path, folders, prompt="a", prompts=str(tmp_path / "p.txt")))
    with pytest.raises(RecipeError, match="write tag_orders=8"):
        resolve(shuffle_caption=True)


def test_an_epoch_draws_one_order_of_the_tags(tmp_path):
    picture(tmp_path / "own/a.png")
    (tmp_path / "own/a.txt").write_text("chart, red, blue, green, grid, legend")
    recipe = recipe_of(tmp_path, str(tmp_path / "own"), tag_orders=4, caption_dropout=0)
    data = cached(recipe, tmp_path)
    (sample,) = data.train
    assert len(set(sample.caption_keys)) == 4
    again = LatentBatches(recipe, None, data.train, data.tensors, data.negative_key)
    drawn = [again.caption(sample, epoch) for epoch in range(40)]
    assert set(drawn) == set(sample.caption_keys)
    assert drawn == [again.caption(sample, epoch) for epoch in range(40)]
