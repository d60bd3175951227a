"""Whatever stands in the small files of a model or run folder: a sentence that names the file.

Every key of every JSON gets values of other types, sizes and shapes, drawn at random; whole files
become lists, deep nests and bytes that are no text.
"""

import contextlib
import json
import random
import warnings

import pytest

from sciftune.core.checkpoint_folders import check_same_run, checkpoint_fault, checkpoint_info
from sciftune.core.digests import sealed
from sciftune.core.files import FileError
from sciftune.core.plan import Plan
from sciftune.core.recipe import Recipe, RecipeError, resolve
from sciftune.core.rundir import RunDir
from sciftune.lab.launch import LaunchFile, read_status, state
from sciftune.models.family import get_family

VALUES = [None, True, -1, 10**7, 10**30, 1.5, float("nan"), "abc", "", [], ["x"], {}, dict(a=1)]
VALUES += [["transformers", "Trainer"], ["transformers"], ["os", "system"], [[1]] * 20_000]
DEEP = b"[" * 5000 + b"]" * 5000
WHOLE = [DEEP, b"\xff\xfe{}", b"[]", b"7", b"null", b"", b"{", b'{"a": NaN', b"9" * 5000]
TRIES = 60  # of a folder


def changes(content, draws):
    """The file as others might write it."""
    value = json.loads(content)
    if draws.random() < 0.2 or not value or not isinstance(value, dict):
        return draws.choice(WHOLE)
    key = draws.choice(sorted(value))
    return json.dumps(value | {key: draws.choice(VALUES)}).encode()


def is_sentence(said, *names):
    """Whether one line names the file, its folder at least."""
    return any(str(name) in said for name in names) and "\n" not in said and len(said) < 900


@pytest.mark.parametrize("name", ["klein", "sdxl", "bagel", "qwenimage"])
def test_a_model_folder(name, tmp_path):
    family, draws = get_family(name), random.Random(name)
    folder = family.tiny(tmp_path / "model")
    files = [f for f in sorted(folder.rglob("*.json")) if f.stat().st_size < 20_000]
    refused = 0
    for _ in range(TRIES):
        file = draws.choice(files)
        good = file.read_bytes()
        odd = changes(good, draws)
        file.unlink()  # a stand-in may be linked
        file.write_bytes(odd)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                family.check_files(folder)
                family.check_schedule(folder)
                family.empty_denoiser(folder)
        except ValueError as error:
            refused += 1
            assert is_sentence(str(error), file.name, file.parent), (file, odd[:80], str(error))
        file.write_bytes(good)
    assert refused > TRIES / 5


@pytest.fixture
def run(tmp_path):
    """A run folder with its small files."""
    run = RunDir(tmp_path / "run")
    step = run.checkpoints / "step_000001"
    step.mkdir(parents=True)
    recipe = resolve(cpu=True)
    recipe.save(run.recipe)
    Plan().save(run.plan)
    run.status.write_text(json.dumps(dict(pid=1, host="far", started=1, log_offset=0)))
    run.record.write_text(json.dumps(dict(packages={}, gpus=[])))
    launch = dict(command=["a"], environment=dict(A="1"), processes=1)
    (run.path / "launch.json").write_text(json.dumps(launch))
    info = dict(step=1, recipe=recipe.model_dump(mode="json"), data="abc", files={}, world_size=1)
    (step / "info.json").write_text(sealed(info))
    return run


def read_all(run):
    """What reads the small files of a run."""
    Recipe.load(run.recipe)
    Plan.load(run.plan)
    LaunchFile.load(run)
    read_status(run)
    state(run)
    run.read_record()
    step = run.checkpoints / "step_000001"
    if fault := checkpoint_fault(step):
        raise FileError(fault)
    check_same_run(checkpoint_info(step), resolve(cpu=True))


def test_a_run_folder(run):
    draws = random.Random(0)
    read_all(run)
    for file in (run.plan, run.status, run.record, run.path / "launch.json"):
        good = file.read_bytes()
        for _ in range(TRIES):
            odd = changes(good, draws)
            file.write_bytes(odd)
            try:
                read_all(run)
            except ValueError as error:
                assert is_sentence(str(error), file.name), (file, odd[:80], str(error))
        file.write_bytes(good)


def test_a_checkpoint_with_a_seal_of_its_own(run):
    draws, file = random.Random(0), run.checkpoints / "step_000001" / "info.json"
    good = json.dumps(checkpoint_info(file.parent)).encode()
    for _ in range(TRIES):
        odd = changes(good, draws)
        with contextlib.suppress(ValueError, RecursionError):
            odd = sealed(json.loads(odd)).encode()
        file.write_bytes(odd)
        try:
            read_all(run)
        except ValueError as error:
            assert is_sentence(str(error).partition("\n")[0], file.name, "resume"), (odd, error)


@pytest.mark.parametrize("odd", [*WHOLE, b"a: &a [*a]", b"1: 2", b"steps: 2020-13-45"])
def test_a_recipe(run, odd):
    run.recipe.write_bytes(odd)
    with pytest.raises(RecipeError) as error:
        Recipe.load(run.recipe)
    assert is_sentence(str(error.value), run.recipe.name)
