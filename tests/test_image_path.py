"""An image on its way from a folder to a batch: how often it is decoded, what it passes."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoded import cached, recipe_of
from PIL import Image, ImageFile

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir, cache_root
from sciftune.data import sources
from sciftune.data.cache import TensorCache
from sciftune.data.encode import EncodingJobs, encode_missing
from sciftune.data.splits import open_recipe_data
from sciftune.models.family import get_family
from sciftune.objectives.common.batches import LatentBatches
from sciftune.objectives.dmd.data import cache_distillation_data
from sciftune.strategies.engine import Engine

PACKAGE = str(Path(sources.__file__).parents[1])
PATH = {
    *("data/readers.py", "data/sources.py", "data/images.py", "data/encode.py"),
    *("models/encoders.py", "data/cache.py", "objectives/common/batches.py"),
}
HELPER = "models/tokens.py"  # stacks the latents of a batch


def pictures(folder, count=6, damaged=()):
    """Write pictures of noise with captions; PNGs whose pixels are cut off where damaged."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        shape = (70 + 10 * (i % 3), 90, 3)
        file = folder / f"{i}.png"
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file)
        if i in damaged:
            file.write_bytes(file.read_bytes()[:9000])
        (folder / f"{i}.txt").write_text(f"noise {i}")
    return str(folder)


@pytest.fixture
def decoded(monkeypatch):
    """Names of files, or None for bytes, that Pillow decodes."""
    seen, load = [], ImageFile.ImageFile.load

    def counted(self):
        if self.tile:
            seen.append(self.filename)
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return seen


def carries(value, depth=0):
    """Return whether a value holds an encoded or decoded image, or its latents."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim >= 3
    if isinstance(value, (list, tuple)) and depth < 2:
        return any(carries(part, depth + 1) for part in value[:4])
    if isinstance(value, dict) and depth < 2:
        return any(carries(part, depth + 1) for part in list(value.values())[:4])
    if isinstance(value, bytes):
        return value[:8] == b"\x89PNG\r\n\x1a\n"
    return isinstance(value, (Image.Image, sources.Sample))


def test_an_image_is_decoded_once_and_passes_few_files(tmp_path, decoded):
    recipe = recipe_of(tmp_path, pictures(tmp_path / "own"), fit="bucket")
    family, files = get_family(recipe.model), set()

    def note(frame, event, value):
        name = frame.f_code.co_filename
        if event == "return" and name.startswith(PACKAGE) and carries(value):
            files.add(name[len(PACKAGE) + 1 :])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        data = cached(recipe, tmp_path)
        LatentBatches(recipe, family, data.train, data.tensors, data.negative_key)(0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(decoded) == 6
    own = {name for name in files if name.startswith(("data/", "models/enc", "objectives/"))}
    assert own == PATH and HELPER in files
    open_recipe_data(recipe)  # the images count as decoded now
    assert len(decoded) == 6


def test_a_damaged_image_is_found_when_it_is_encoded(tmp_path):
    "Everything is as if its file were not there."
    whole = cached(recipe_of(tmp_path, pictures(tmp_path / "whole"), held_out=1), tmp_path)
    damaged = pictures(tmp_path / "damaged", damaged=(4,))
    recipe = recipe_of(tmp_path, damaged, held_out=1, max_bad_fraction=0.2)
    data = cached(recipe, tmp_path)
    kept = {sample.id: sample for sample in (*data.train, *data.held)}
    assert sorted(kept) == [f"{i}.png" for i in (0, 1, 2, 3, 5)] and data.rejected == 1
    for sample in (*whole.train, *whole.held):
        if sample.id in kept:
            assert kept[sample.id].image_key == sample.image_key
    (row,) = map(json.loads, (tmp_path / "run/quarantine.jsonl").read_text().splitlines())
    assert row["source"].endswith("4.png") and "truncated" in row["reason"]
    assert open_recipe_data(recipe).fingerprint == data.fingerprint
    with pytest.raises(sources.DataError, match="1 of 6 rows cannot be used"):
        cached(recipe_of(tmp_path, damaged), tmp_path)


class Averaging:
    """Encode pictures to averages."""

    name, negative_caption, text_components = "averaging", "", ()
    mixes_sizes, captions_see_references = True, False

    def caption_switches(self, folder):
        return {}

    def load_encoders(self, path, dtype, device, *, parts):
        return SimpleNamespace(unload=lambda: None)

    def encode_images(self, encoders, pixels):
        return dict(mean=torch.nn.functional.avg_pool2d(pixels, 8))

    def encode_captions_with(self, encoders, captions, references, text_tokens):
        return [dict(text=torch.ones(1))] * len(captions)


def test_all_ranks_learn_of_a_damaged_image(tmp_path):
    recipe = recipe_of(tmp_path, pictures(tmp_path / "own", 12, damaged=(7,)))
    found = dict(cache=cache_root(recipe.run_root) / "verified", decode=False, max_bad_fraction=0.5)
    done = {}

    def encode(rank):
        collection = sources.open_collection(recipe.data, **found)
        jobs = EncodingJobs(recipe, Averaging(), collection, tmp_path)
        for i in range(len(collection)):
            jobs.sample(i)
        ranks = SimpleNamespace(rank=rank, world=2, main=not rank, device=torch.device("cpu"))
        cache = TensorCache(tmp_path / "tensors")
        done[rank] = encode_missing(jobs, cache, ranks, lambda line: None), len(collection)

    for expected in ((False, 12), (True, 11)):
        threads = [threading.Thread(target=encode, args=[rank]) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert done == {0: expected, 1: expected}
        done.clear()


def test_distillation_decodes_once(tmp_path, decoded):
    "Real latents of a discriminator; a damaged image is left out."
    data = pictures(tmp_path / "own", damaged=(2,))
    fields = dict(objective="dmd2", gan=True, max_bad_fraction=0.2, resolution=64)
    recipe = resolve(cpu=True, run_root=str(tmp_path / "runs"), data=data, model="sd15", **fields)
    family, engine = get_family("sd15"), Engine(recipe)
    run = RunDir(tmp_path / "run")
    found = cache_distillation_data(recipe, family, engine, run, say=lambda line: 0)
    assert sorted(sample.id for sample in found.real) == [f"{i}.png" for i in (0, 1, 3, 4, 5)]
    assert found.rejected == 1 and len(decoded) == 6
