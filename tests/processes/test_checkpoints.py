"""Checkpoints that are hostile, damaged, spoilt or in the way: whole runs in forked processes, tiny models."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
from forked import log, start, train, wait

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir

BASE = dict(
    model="qwenimage",
    figures=24,
    held_out=4,
    micro_batch=2,
    global_batch=2,
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
        cpu=True, run_root=str(root), name=name, stall_seconds=60, **dict(BASE, **fields)
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
    "A checkpoint whose metadata runs a command, complete in every other respect; and what the command makes."
    ran = tmp_path / "ran"
    folder = tmp_path / "step_000003"
    shutil.copytree(trained.checkpoints / "step_000003", folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Command(f"touch {ran}")))
    accept(folder)
    return folder, ran


def accept(folder):
    "Make info.json agree with the files, as whoever crafts a checkpoint would."
    info = json.loads((folder / "info.json").read_text())
    info["files"] = {name: (folder / name).stat().st_size for name in info["files"]}
    (folder / "info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("field", ["resume", "start_from"])
def test_a_checkpoint_runs_nothing(root, hostile, field):
    folder, ran = hostile
    codes, text = attempt(root, f"hostile-{field}", **{field: str(folder)})
    assert codes == [2] and not ran.exists(), text
    said = one_sentence(text, "CheckpointError")
    assert f"{folder}/.metadata is refused" in said and "posix.system" in said


def test_an_export_runs_nothing(hostile, tmp_path):
    folder, ran = hostile
    code = "import sys; from sciftune.lab.convert import convert_command as c; c(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and not ran.exists()
    assert f"{folder}/.metadata is refused" in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp_path / "out").exists()
