"""Checkpoints that are hostile, damaged, spoilt or in the way: whole runs, tiny models."""

import math
import os
import pickle
import random
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from forked import ENGINES, deviation, log, losses, start, train, wait

from sciftune.core import digests
from sciftune.core.checkpoint_folders import (
    CheckpointError,
    checkpoint_damage,
    checkpoint_fault,
    checkpoint_info,
    complete_checkpoints,
)
from sciftune.core.diagnosis import Case, recognise
from sciftune.core.digests import digest_record, file_digests, sealed
from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.data.cache import TensorCache
from sciftune.data.images import DataError
from sciftune.lab.convert import convert_checkpoint
from sciftune.models.family import get_family
from sciftune.strategies.engine import Engine
from sciftune.training import checkpoints, trainer
from sciftune.training.checkpoints import Checkpointer
from sciftune.training.export import export_damage, write_component

BASE = dict(
    model="qwenimage",
    figures=24,
    held_out=4,
    micro_batch=2,
    global_batch=4,
    validation_steps=0,
    checkpoint_steps=1,
    steps=3,
    lr_schedule="constant",
    export=False,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(root):
    run = RunDir(root / "trained")
    train(run, **BASE)
    return run


def attempt(root, name, sabotage=None, **fields):
    "Train in `root/name`, whatever comes of it: exit codes, and the log."
    run = RunDir(root / name)
    recipe = resolve(
        cpu=True, run_root=str(root), name=name, **dict(BASE, stall_seconds=60) | fields
    )
    codes = wait(start(run, recipe, sabotage), 120)
    return codes, log(run)


def one_sentence(text, kind):
    "The last thing said, which must be an error of this kind and no traceback."
    assert "Traceback" not in text, text
    found = [line for line in text.splitlines() if f"{kind}: " in line]
    assert len(found) == 1, text
    return found[0]


class Command:
    "Pickled, it is a call of os.system."

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return os.system, (self.text,)


@pytest.fixture
def hostile(trained, tmp_path):
    """A checkpoint whose metadata runs a command, else complete; and what the command makes."""
    ran = tmp_path / "ran"
    folder = tmp_path / "step_000003"
    shutil.copytree(trained.checkpoints / "step_000003", folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Command(f"touch {ran}")))
    accept(folder)
    return folder, ran


def accept(folder):
    "Make info.json agree with the files, as whoever crafts a checkpoint would."
    info = checkpoint_info(folder)
    info["files"] = {name: (folder / name).stat().st_size for name in info["files"]}
    info["digests"] = digest_record({name: file_digests(folder / name) for name in info["files"]})
    (folder / "info.json").write_text(sealed(info))


@pytest.mark.parametrize("field", ["resume", "start_from"])
def test_a_checkpoint_runs_nothing(root, hostile, field):
    folder, ran = hostile
    codes, text = attempt(root, f"hostile-{field}", **{field: str(folder)})
    assert codes == [2] and not ran.exists(), text
    said = one_sentence(text, "CheckpointError")
    assert f"{folder}/.metadata is refused" in said and "posix.system" in said


def test_an_export_runs_nothing(hostile, tmp_path):
    folder, ran = hostile
    with pytest.raises(CheckpointError, match=f"{folder}/.metadata is refused"):
        convert_checkpoint(folder, tmp_path / "out")
    assert not ran.exists() and not (tmp_path / "out").exists()


# Damage


def flip(file, at, mask=1):
    "Change one byte of a file; gives what was there before."
    before = file.read_bytes()
    file.write_bytes(before[:at] + bytes([before[at] ^ mask]) + before[at + 1 :])
    return before


def copied(trained, root, name):
    "Another run folder with the same checkpoints and metrics."
    shutil.copytree(trained.path, root / name)
    return RunDir(root / name)


def test_latest_passes_over_a_damaged_one_and_says_so(root, trained):
    run = copied(trained, root, "one-damaged")
    flip(run.checkpoints / "step_000003" / "__0_0.distcp", 5000)
    m = train(run, **dict(BASE, steps=4, resume="latest", num_processes=2, **ENGINES["fsdp"]))
    text = log(run)
    assert "resume: passed over" in text and "step_000003/__0_0.distcp is damaged" in text
    assert "resumed from step_000002" in text and set(losses(m)) == {1, 2, 3, 4}
    assert deviation(m, trained.read_metrics()) <= 1e-5
    assert not checkpoint_damage(run.checkpoints / "step_000003"), "not written again"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(root, trained):
    run = copied(trained, root, "all-damaged")
    for folder in run.checkpoints.iterdir():
        flip(folder / "__0_0.distcp", 5000)
    before = run.metrics.read_bytes()
    codes, text = attempt(root, run.path.name, resume="latest")
    assert codes == [2] and run.metrics.read_bytes() == before
    assert "none of the 2 checkpoints can be used" in one_sentence(text, "RecipeError")
    assert recognise(Case(text, 2))[0].name == "damaged file"
    codes, text = attempt(root, run.path.name, resume="step_000003")
    assert codes == [2] and "step_000003/__0_0.distcp is damaged" in text


def test_latest_without_any_checkpoint_begins(root):
    codes, text = attempt(root, "nothing-yet", resume="latest", steps=1)
    assert codes == [0] and "no checkpoint in" in text and "beginning at step 0" in text


class Checkpoint:
    "What is written at a checkpoint, read as a resume reads it."

    def __init__(self, folder):
        engine = Engine(resolve(cpu=True))
        torch.manual_seed(0)
        network = engine.network(torch.nn.Sequential(torch.nn.Linear(20, 30)), "denoiser")
        info = dict(recipe=resolve(cpu=True).model_dump(mode="json"), data="abc", task={})
        Checkpointer(engine, RunDir(folder), wait=True).save(1, dict(denoiser=network), info)
        (self.folder,) = complete_checkpoints(RunDir(folder))

    def fault(self):
        return checkpoint_fault(self.folder) or checkpoint_damage(self.folder)


class Cache:
    "Shards of the cache, read as training reads them."

    def __init__(self, folder):
        self.folder = folder
        with TensorCache(folder).writer(flush_entries=2) as writer:
            for i in range(6):
                writer.add(f"key{i}", dict(x=torch.randn(50), y=torch.tensor([i]).bfloat16()))

    def fault(self):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cache = TensorCache(self.folder)
            for key in list(cache.keys()):
                try:
                    cache[key]
                except (DataError, KeyError) as error:  # of a shard that was just dropped
                    said.append(error)
        return "\n".join(str(getattr(one, "message", one)) for one in said)


class Export:
    "A pipeline whose denoiser was written by a run, read as one that trains from it."

    def __init__(self, folder):
        family = get_family("flux1")
        base = family.tiny(folder / "base")
        weights = family.denoiser_weights(base)
        write_component({}, weights, folder / "model" / "transformer", max_shard_size="50KB")
        self.folder = folder / "model"

    def fault(self):
        return export_damage(self.folder)


@pytest.mark.parametrize("kind", [Checkpoint, Export])
def test_files_are_flushed_when_much_waits_in_memory(kind, tmp_path, monkeypatch):
    "As with every file of more than 1 GiB; here 1000 bytes are much."
    flushed, sync = [], digests.DigestingFile.sync
    monkeypatch.setattr(digests, "FLUSH_EVERY", 1000)
    monkeypatch.setattr(digests.DigestingFile, "sync", lambda f: flushed.append(f) or sync(f))
    assert not kind(tmp_path).fault() and len(flushed) > 3


def test_every_flipped_byte_is_found_and_its_file_named(tmp_path):
    "SCIFTUNE_FLIPS (200) bytes are changed, one at a time, in files of every kind."
    rng = random.Random(0)
    kinds = [kind(tmp_path / kind.__name__) for kind in (Checkpoint, Cache, Export)]
    files = {kind: sorted(p for p in kind.folder.rglob("*") if p.is_file()) for kind in kinds}
    assert {p.suffix for found in files.values() for p in found} == {
        "",  # .metadata
        ".distcp",
        ".json",
        ".safetensors",
    }
    missed = []
    for number in range(int(os.environ.get("SCIFTUNE_FLIPS", 200))):
        kind = kinds[number % 3]
        file = rng.choice(files[kind])
        whole = {path: path.read_bytes() for path in files[kind]}
        at = rng.randrange(len(whole[file]))
        flip(file, at, rng.randrange(1, 256))
        if Path(file).stem not in kind.fault():
            missed.append((file, at))
        for path, content in whole.items():
            path.write_bytes(content)
        assert not kind.fault()
    assert not missed


# Ends while a checkpoint is being written


def slow_until(words):
    "Checkpoints that go on growing until the log says `words`."

    def save(rank, run):
        real = checkpoints.dcp.save

        def grow(*a, **k):
            metadata = real(*a, **k)
            with open(k["storage_writer"].path / f"more_{rank}", "wb") as more:
                while words not in log(run):
                    more.write(b"more")
                    more.flush()
                    time.sleep(0.1)
            return metadata

        checkpoints.dcp.save = grow

    return save


def at_step(step, happens, ranks):
    "The ranks do something else than this step."

    def change(rank, run):
        real = trainer.train_step
        if rank in ranks:
            trainer.train_step = lambda run, s, b: happens() if s == step else real(run, s, b)

    return change


def fails():
    raise ZeroDivisionError("the step after a save broke")


def both(*changes):
    return lambda rank, run: [change(rank, run) for change in changes]


@pytest.mark.parametrize("engine, world, ranks", [("single", 1, (0,)), ("fsdp", 2, (1,))])
def test_an_error_right_after_a_save_keeps_the_checkpoint(root, engine, world, ranks):
    "One rank fails while all write: none ends before the checkpoint is complete."
    sabotage = both(slow_until("is written to its end"), at_step(1, fails, ranks))
    name = f"error-{engine}"
    codes, text = attempt(root, name, sabotage, num_processes=world, **ENGINES[engine])
    run = RunDir(root / name)
    assert codes[ranks[0]] == 1 and "the step after a save broke" in text, text
    (kept,) = run.checkpoints.iterdir()
    assert kept.name == "step_000001" and not (checkpoint_fault(kept) or checkpoint_damage(kept))


def test_a_stall_right_after_a_save_keeps_the_checkpoint(root):
    "The watchdog ends the ranks, and they write to the end what grows."
    sabotage = both(slow_until("is written to its end"), at_step(1, lambda: time.sleep(3600), (1,)))
    fields = dict(num_processes=2, stall_seconds=10, **ENGINES["ddp"])
    codes, text = attempt(root, "stall", sabotage, **fields)
    assert 17 in codes and "no progress for 10 s" in text, text
    (kept,) = RunDir(root / "stall").checkpoints.iterdir()
    assert kept.name == "step_000001" and not (checkpoint_fault(kept) or checkpoint_damage(kept))


# Weights that are no numbers


def spoils(step, value=math.nan):
    "After this step all weights are this."

    def change(rank, run):
        real = trainer.train_step

        def train_step(run, s, batches):
            numbers = real(run, s, batches)
            if s == step:
                for parameter in run.networks["denoiser"].parameters():
                    parameter.data.fill_(value)
            return numbers

        trainer.train_step = train_step

    return change


def test_latest_passes_over_spoilt_weights_and_naming_them_is_refused(root, trained):
    codes, text = attempt(root, "spoilt", spoils(2), steps=5)
    run = RunDir(root / "spoilt")
    assert codes == [2] and "loss is nan at step 4" in text, text
    kept = sorted(p.name for p in run.checkpoints.iterdir())
    assert kept == ["step_000001", "step_000002", "step_000003"]  # two that are usable, and one
    for field in ("resume", "start_from"):
        fields = {field: str(run.checkpoints / "step_000003")}
        codes, text = attempt(root, f"spoilt-{field}", steps=5, **fields)
        assert codes == [2]
        assert "its weights are not finite numbers (denoiser/" in one_sentence(text, "RecipeError")
    m = train(run, **dict(BASE, steps=5, resume="latest"))
    text = log(run)
    assert "resume: passed over" in text and "resumed from step_000002" in text
    assert deviation(m, trained.read_metrics()) <= 1e-5 and set(losses(m)) == {1, 2, 3, 4, 5}
    assert not checkpoint_fault(run.checkpoints / "step_000005")


def test_a_first_step_that_spoils_the_weights(root):
    """The only checkpoint has finite weights of 1e30, which the next step cannot use.

    There is nothing to go on from, and no new start.
    """
    codes, text = attempt(root, "huge", spoils(0, 1e30), steps=5)
    assert codes == [2] and "loss is nan at step 2" in text, text
    codes, text = attempt(root, "huge", resume="latest", steps=5)
    assert codes == [2] and "none of the 1 checkpoints can be used" in text


def test_spoilt_weights_are_not_exported_and_no_older_ones_in_their_place(root):
    codes, text = attempt(root, "spoilt-end", spoils(2), export=True)
    assert codes == [2] and not (root / "spoilt-end" / "model").exists()
    said = one_sentence(text, "CheckpointError")
    assert "export: " in said and "step_000003: its weights are not finite" in said
