"""What a disk can do to a file is found when it is read, and the file is named.

Checkpoints, cached tensors and exports: bits that flip, files that are cut off, lost, longer than
they were, or exchanged for another one.
"""

import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from additions import added

from sciftune.core.checkpoint_folders import checkpoint_damage, checkpoint_fault
from sciftune.core.digests import DIGESTS_FILE
from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.data.cache import TensorCache
from sciftune.data.images import DataError
from sciftune.models.family import get_family
from sciftune.strategies.adapters.layers import add_lora
from sciftune.strategies.adapters.saving import save_lora
from sciftune.strategies.engine import Engine
from sciftune.training.checkpoints import Checkpointer
from sciftune.training.export import export_damage, export_pipeline

FLIPS = 50  # of a byte, in each kind of folder
OTHERS = 10  # of all other damage
KEYS = [f"{number:064x}" for number in range(8)]


# What is damaged


def make_checkpoint(family, base, root):
    """Of a stand-in, as a run writes it."""
    engine = Engine(resolve(cpu=True))
    network = engine.network(family.load_denoiser(base), "denoiser")
    record = dict(recipe=resolve(model=family.name).model_dump(mode="json"), data="")
    Checkpointer(engine, RunDir(root), wait=True).save(1, dict(denoiser=network), record)
    return root / "checkpoints" / "step_000001"


def make_adapters(family, base, out):
    """Of a run with LoRA."""
    recipe = resolve(model=family.name, lora_rank=2, lora_targets="attn.to_q")
    model = family.load_denoiser(base)
    add_lora(model, family, recipe)
    tensors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    save_lora(tensors, family, recipe, base, out)
    return out


def make_cache(folder):
    """Four shards of two entries."""
    with TensorCache(folder).writer(flush_entries=2) as writer:
        for number, key in enumerate(KEYS):
            values = torch.full((50,), number)
            writer.add(key, dict(mean=values, mask=values > 3))
    return folder


def make(kind, root):
    """A folder as this package writes it."""
    if kind == "cache":
        return make_cache(root / "cache")
    family = get_family(kind.removeprefix("export of ") if " of " in kind else "flux1")
    base = family.tiny(root / "base")
    if kind == "adapters":
        return make_adapters(family, base, root / "lora")
    checkpoint = make_checkpoint(family, base, root)
    if kind == "checkpoint":
        return checkpoint
    export_pipeline(checkpoint, family, base, root / "model", max_shard_size="100KB")
    return Path(shutil.copytree(root / "model", root / "copied"))  # no links of the base


# Who finds it


def found_in_checkpoint(folder):
    """What a resume, `start_from` and the converters say."""
    return checkpoint_fault(folder) or checkpoint_damage(folder)


def found_in_cache(folder):
    """What is said while all of a cache is read."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            cache = TensorCache(folder)
            [cache[key] for key in KEYS if key not in cache.missing(KEYS)]
        except DataError as error:
            return str(error)
    return "".join(str(warning.message) for warning in said)


FOUND = dict(
    checkpoint=found_in_checkpoint,
    cache=found_in_cache,
    adapters=export_damage,
    export=export_damage,
)
FOUND |= {f"export of {name}": export_damage for more in added("EXPORTS") for name in more}


# What happens to files


def flip(files, draws):
    """One byte of a file is another one."""
    file = draws.choice(files)
    content = bytearray(file.read_bytes())
    content[draws.randrange(len(content))] ^= draws.randrange(1, 256)
    file.write_bytes(content)
    return [file]


def cut(files, draws):
    """A file ends too early."""
    file = draws.choice(files)
    file.write_bytes(file.read_bytes()[: draws.randrange(file.stat().st_size)])
    return [file]


def lengthen(files, draws):
    """A file goes on."""
    file = draws.choice(files)
    file.write_bytes(file.read_bytes() + draws.randbytes(9))
    return [file]


def blank(files, draws):
    """A stretch of a file was never written."""
    file = draws.choice(files)
    content = bytearray(file.read_bytes())
    first = draws.randrange(len(content))
    content[first : first + 4096] = bytes(len(content[first : first + 4096]))
    file.write_bytes(content)
    return [file]


def lose(files, draws):
    """A file is gone, of those without which the folder still claims to be complete."""
    top = min(files, key=lambda file: len(file.parts)).parent
    marks = [top / DIGESTS_FILE, *top.glob("shard-*.json")]
    kept = [file for file in files if file not in marks]
    file = draws.choice(kept)
    file.unlink()
    return [file]


def exchange(files, draws):
    """Two files have each other's content."""
    one, other = draws.sample(files, 2)
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    return [one, other]


HARM = dict(flip=FLIPS, cut=OTHERS, lengthen=OTHERS, blank=OTHERS, lose=OTHERS, exchange=OTHERS)


@pytest.fixture(scope="module", params=FOUND)
def written(request, tmp_path_factory):
    """A folder, and what finds its damage."""
    root = tmp_path_factory.mktemp("damage")
    return make(request.param, root), FOUND[request.param]


@pytest.mark.parametrize("harm,count", HARM.items(), ids=HARM)
def test_damage_is_found_and_named(written, harm, count):
    folder, found = written
    draws = random.Random(f"{folder.name}, {harm}")
    assert found(folder) == ""
    contents = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    hurt = Counter()
    for _ in range(count):
        touched = []
        while all(file.exists() and file.read_bytes() == contents[file] for file in touched):
            touched = globals()[harm](list(contents), draws)
        said = found(folder)
        names = [file.stem if harm == "exchange" else file.name for file in touched]
        assert any(name in said for name in names), f"{harm} of {names}: {said or 'not found'}"
        assert len(said.splitlines()) == 1, said
        hurt.update(names)
        for file in contents if folder.name == "cache" else touched:  # a fault removes an index
            file.write_bytes(contents[file])
    assert found(folder) == "" and len(hurt) >= min(2, len(contents) - 1)
