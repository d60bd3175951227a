"""Masks and boxes of words on their way from a collection to the loss."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from encoded import cached, recipe_of
from PIL import Image

from sciftune.core.fields import RecipeError
from sciftune.data.cells import box_cells, mask_cells
from sciftune.data.images import DataError
from sciftune.data.sources import open_collection
from sciftune.data.splits import open_recipe_data
from sciftune.models.family import get_family
from sciftune.objectives.common.batches import LatentBatches, cell_weights, held_out_batch
from sciftune.objectives.epsilon.loss import NoisePrediction
from sciftune.objectives.flow.loss import FlowMatching
from sciftune.training.task import OptimizerStep

SIZES = ((90, 70), (64, 96), (80, 80), (130, 66), (75, 90), (96, 64))
BOX = [10.0, 20.0, 40.0, 33.0]


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def rows():
    "Pictures of several shapes; every second has a mask, and all but the last know their words."
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        mask = np.where(rng.random((height, width)) < 0.5, 255, 0).astype(np.uint8)
        labels = [dict(text="0.5", box=BOX), dict(text="a", box=[0, 0, 5, i])][: 2 * (i < 5)]
        yield png(picture), png(mask) if i % 2 == 0 else None, labels


def write_list(folder):
    lines = []
    for i, (picture, mask, labels) in enumerate(rows()):
        (folder / f"{i}.png").write_bytes(picture)
        line = dict(file_name=f"{i}.png", text=f"noise {i}", labels=labels)
        if mask:
            (folder / f"m{i}.png").write_bytes(mask)
            line["mask"] = f"m{i}.png"
        lines.append(json.dumps(line))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def write_folder(folder):
    "Names of masks as here and as OneTrainer has them; words beside the caption."
    for i, (picture, mask, labels) in enumerate(rows()):
        (folder / f"{i}.json").write_text(json.dumps(dict(labels=labels)))
        (folder / f"{i}.png").write_bytes(picture)
        (folder / f"{i}.txt").write_text(f"noise {i}")
        if mask:
            (folder / (f"{i}-masklabel.png" if i else "0.mask.png")).write_bytes(mask)


def write_tar(folder):
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i, (picture, mask, labels) in enumerate(rows()):
            words = json.dumps(dict(labels=labels)).encode()
            parts = {"png": picture, "txt": b"noise", "json": words, "mask.png": mask}
            for suffix, data in parts.items():
                if data:
                    member = tarfile.TarInfo(f"{i}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_parquet(folder):
    table = [
        dict(image=dict(bytes=p, path=None), text=f"noise {i}", mask=m, labels=w)
        for i, (p, m, w) in enumerate(rows())
    ]
    pq.write_table(pa.Table.from_pylist(table), folder / "a.parquet", row_group_size=4)


WRITERS = dict(list=write_list, folder=write_folder, tar=write_tar, parquet=write_parquet)


@pytest.fixture
def given(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    write_list(folder)
    return str(folder)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_reader_lists_masks_and_words_where_they_are_asked_for(tmp_path, kind):
    WRITERS[kind](tmp_path)
    plain = open_collection(tmp_path)
    assert len(plain) == 6 and not any(plain.masks) and not any(plain.boxes)
    asked = open_collection(tmp_path, areas=("mask", "words"))
    assert (asked.ids, asked.digests) == (plain.ids, plain.digests)
    assert asked.fingerprint != plain.fingerprint
    for i, (_, mask, labels) in enumerate(rows()):
        assert asked.mask(i) == (mask or b"")
        assert asked.boxes[i] == tuple(tuple(map(float, word["box"])) for word in labels)
    if kind in ("folder", "list"):
        assert "3 x mask" in asked.notes[-1] and "not read: 3 x" in plain.notes[-1]
    assert open_collection(tmp_path, areas=("words",)).masks[0] == ()


FITS = dict(
    crop=dict(fit="crop"),
    bucket=dict(fit="bucket"),
    pad=dict(fit="pad"),
    packing=dict(fit="pad", packing=True),
    references=dict(fit="pad", reference_images=1),
)


@pytest.mark.parametrize("fit", FITS)
def test_weights_follow_the_picture_into_the_batch(tmp_path, given, fit):
    "Each cell of a batch has the share that its part of the picture has, whatever the fit."
    more = dict(model="klein", mask_outside=0.25, text_weight=5.0, held_out=1, micro_batch=2)
    listing = tmp_path / "own/metadata.jsonl"
    if fit == "references":
        lines = map(json.loads, listing.read_text().splitlines())
        lines = [dict(line, source=[line["file_name"]][: i % 2]) for i, line in enumerate(lines)]
        listing.write_text("\n".join(map(json.dumps, lines)))
    none = '"labels": [{"box": [0, 0, 0, 0]}]'
    listing.write_text(listing.read_text().replace('"labels": []', none))
    recipe = recipe_of(tmp_path, given, global_batch=4, **more, **FITS[fit])
    family, data = get_family("klein"), cached(recipe, tmp_path)
    collection = open_recipe_data(recipe)
    for step in range(3):
        for batch in LatentBatches(recipe, family, data.train, data.tensors, data.negative_key)(
            step
        ):
            for k, name in enumerate(batch["ids"]):
                i = collection.ids.index(name)
                sample = next(s for s in data.train if s.id == name)
                height, width = (sample.sizes or ((64, 64),))[0]
                place = collection.sizes[i], height, width, 16, recipe.fit == "pad"
                words = 1 + 4 * box_cells(collection.boxes[i], *place)
                expected = words / words.mean()
                if mask := collection.mask(i):
                    expected = expected * (0.25 + 0.75 * mask_cells(mask, *place))
                seen = batch["cells"][k, 0, : height // 16, : width // 16].numpy()
                np.testing.assert_allclose(seen, expected, rtol=1e-5)
    two = [
        LatentBatches(recipe, family, data.train, data.tensors, data.negative_key, r, 2)(0)
        for r in (0, 1)
    ]
    cells = {
        name: row
        for rank in two
        for b in rank
        for name, row in zip(b["ids"], b["cells"], strict=True)
    }
    for name, row in cells.items():
        sample = next(s for s in data.train if s.id == name)
        own = cell_weights(recipe, data.tensors[sample.image_key])
        assert torch.equal(row[:, : own.shape[1], : own.shape[2]], own)
    held = held_out_batch(recipe, family, data, [0])["cells"][0]  # words do not count more there
    own = data.tensors[data.held[0].image_key]
    plain = cell_weights(recipe, own, words=False)
    assert torch.equal(held, plain) and ("inside" in own) == bool((plain < 1).any())


class Answering:
    "A family whose denoiser answers what it is given."

    def predict(self, denoiser, x, sigma, conditioning):
        return denoiser(x)

    def noise_schedule(self, base):
        from sciftune.models.ddpm import NoiseSchedule

        return NoiseSchedule.from_config({})


@pytest.mark.parametrize("loss", [FlowMatching, NoisePrediction])
@pytest.mark.parametrize("sizes", [None, [(8, 8), (6, 5), (3, 8)]])
def test_the_loss_is_the_weighted_mean_and_plain_at_weight_one(tmp_path, given, loss, sizes):
    recipe = recipe_of(tmp_path, given)
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 3, 4, 8, 8)
    batch = dict(x0=x0, noise=noise, sigma=torch.tensor([0.1, 0.5, 0.9]), weight=torch.ones(3))
    batch["conditioning"] = dict(sizes=sizes) if sizes else {}
    batch |= dict(ids=["a", "b", "c"], epochs=[0, 0, 0])
    made = loss(recipe, Answering())

    def value(**more):
        networks = dict(denoiser=torch.nn.Conv2d(4, 4, 1))
        torch.nn.init.constant_(networks["denoiser"].weight, 0.1)
        torch.nn.init.zeros_(networks["denoiser"].bias)
        found, _ = made.loss(OptimizerStep("denoiser"), networks, batch | more)
        found.backward()
        return found, networks["denoiser"].weight.grad

    for plain, ones in zip(value(), value(cells=torch.ones(3, 1, 8, 8)), strict=True):
        assert torch.equal(plain, ones)
    cells = torch.rand(3, 1, 8, 8)
    errors = made.per_sample(lambda x: 0 * x, batch)
    weighted = made.per_sample(lambda x: 0 * x, batch | dict(cells=cells))
    for k, (h, w) in enumerate(sizes or [(8, 8)] * 3):
        target = (noise - x0 if loss is FlowMatching else noise)[k, :, :h, :w].square()
        torch.testing.assert_close(errors[k], target.mean())
        torch.testing.assert_close(weighted[k], (target * cells[k, :, :h, :w]).mean())


def test_weights_of_words_have_mean_one_and_masks_are_as_they_are(tmp_path, given):
    recipe = recipe_of(tmp_path, given, mask_outside=0.5, text_weight=9.0)
    encoded = dict(mean=torch.zeros(4, 2, 2), words=torch.tensor([[1.0, 0], [0, 0]]))
    three = torch.tensor([[[3.0, 1 / 3], [1 / 3, 1 / 3]]])
    assert torch.equal(cell_weights(recipe, encoded), three)
    masked = dict(mean=encoded["mean"], inside=torch.tensor([[1.0, 0], [0.5, 0]]))
    assert cell_weights(recipe, masked).flatten().tolist() == [1.0, 0.5, 0.75, 0.5]
    assert torch.equal(cell_weights(recipe, dict(mean=encoded["mean"])), torch.ones(1, 2, 2))
    for outside in (encoded["words"] * 0, encoded["words"] * 0 + 1):  # no words, words all over
        assert torch.equal(cell_weights(recipe, encoded | dict(words=outside)), torch.ones(1, 2, 2))


def test_what_nothing_would_read_is_refused(tmp_path, given):
    for field in ("mask_outside", "text_weight"):
        with pytest.raises(RecipeError, match=f"{field}: needs objective 'epsilon' or 'flow'"):
            recipe_of(tmp_path, given, objective="dmd2", model="sd15", **{field: 0.5})
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.png").write_bytes(png(np.zeros((40, 40), np.uint8)))
    (other / "a.txt").write_text("black")
    with pytest.raises(RecipeError, match="mask_outside: 0.1, but no row of data has a mask"):
        open_recipe_data(recipe_of(tmp_path, str(other), mask_outside=0.1))
    (other / "a.mask.png").write_bytes(png(np.zeros((20, 40), np.uint8)))
    open_recipe_data(recipe_of(tmp_path, str(other)))  # it is not read
    with pytest.raises(DataError, match="mask: 40x20 beside an image of 40x40: it must have"):
        open_recipe_data(recipe_of(tmp_path, str(other), mask_outside=0.1))


def test_a_damaged_mask_sets_its_row_aside_and_not_its_picture(tmp_path, given):
    damaged = tmp_path / "own/m2.png"
    damaged.write_bytes(damaged.read_bytes()[:400])
    recipe = recipe_of(tmp_path, given, mask_outside=0.1, max_bad_fraction=0.2)
    data = cached(recipe, tmp_path)
    assert [s.id for s in data.train] == [f"{i}.png" for i in (0, 1, 3, 4, 5)]
    row = json.loads((tmp_path / "run/quarantine.jsonl").read_text())
    assert row["source"] == "metadata.jsonl:3" and row["reason"].startswith(
        "mask: unreadable image"
    )
    assert len(cached(recipe_of(tmp_path, given), tmp_path).train) == 6


def test_words_are_read_where_no_box_is_known(tmp_path, given, monkeypatch):
    from sciftune.data import encode, splits

    class Line:
        box = tuple(BOX)

    monkeypatch.setattr(encode, "read_text", lambda picture: [Line])
    monkeypatch.setattr(splits, "can_read_text", lambda: True)
    recipe = recipe_of(tmp_path, given, text_weight=3.0)
    data = cached(recipe, tmp_path)
    seen = data.tensors[data.train[5].image_key]["words"]
    factor = get_family(recipe.model).latent_factor
    assert np.array_equal(seen, box_cells([BOX], SIZES[5], 64, 64, factor))
    monkeypatch.setattr(splits, "can_read_text", lambda: False)
    with pytest.raises(RecipeError, match="text_weight: 5.png has no boxes of its words in labels"):
        open_recipe_data(recipe)
