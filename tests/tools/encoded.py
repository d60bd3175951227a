"""A small recipe of a folder of pictures, and its data encoded in this process."""

from pathlib import Path

from sciftune.core.recipe import Recipe, resolve
from sciftune.core.rundir import RunDir
from sciftune.data.encode import CachedData
from sciftune.models.family import get_family
from sciftune.strategies.engine import Engine
from sciftune.training.encoding import cache_data


def recipe_of(tmp_path: Path, data: str, **fields: object) -> Recipe:
    """Return a recipe for CPUs with one sample a batch; runs lie below `tmp_path`."""
    small = dict(resolution=64, held_out=0, validation_images=0, micro_batch=1, global_batch=1)
    return resolve(cpu=True, run_root=str(tmp_path / "runs"), data=data, **small | fields)


def cached(recipe: Recipe, tmp_path: Path) -> CachedData:
    """Encode the data of a recipe."""
    family = get_family(recipe.model)
    return cache_data(recipe, family, Engine(recipe), RunDir(tmp_path / "run"), say=lambda line: 0)
