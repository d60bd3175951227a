"""A run in folders whose names shells, patterns and templates read in another way.

The working directory, the data, the run, its root, the temporary files and the pictures have such
names, and nothing but what was asked for is left.
"""

import os
import subprocess

import pytest
from PIL import Image

from sciftune.core.checkpoint_folders import complete_checkpoints
from sciftune.core.rundir import RunDir
from sciftune.lab.jobs import state

ODD = "a[b]{c} 'd' \"e\" ü 50% $HOME #1 {0} *"
SMALL = dict(
    preset="tiny",
    steps=1,
    lr_schedule="constant",
    warmup_steps=0,
    held_out=2,
    validation_images=1,
    validation_sample_steps=1,
    checkpoint_steps=1,
    cpu=True,
    plan_check=False,
)


@pytest.fixture
def work(tmp_path):
    "A working directory with a data folder."
    folder = tmp_path / f"{ODD} {'y' * 200}"[:200]
    data = folder / f"data {ODD}"
    data.mkdir(parents=True)
    for number in range(8):
        picture = data / f"{number} {ODD}.png"
        Image.effect_noise((64, 64), 10 + 10 * number).convert("RGB").save(picture)
        picture.with_suffix(".txt").write_text(f"picture {number}")
    return folder


@pytest.fixture
def command(root, work, tmp_path, warm_python):
    "Runs a command that shall end well; returns what it said."
    temporary = tmp_path / f"tmp {ODD}"
    temporary.mkdir()

    def run(*words, code=0):
        done = subprocess.run(
            [warm_python, "-m", "sciftune.lab.command", *words],
            cwd=work,
            env=os.environ | {"PYTHONPATH": str(root), "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, done.stdout
        assert not list(temporary.iterdir()), words
        return done.stdout

    return run


def test_trains_resumes_evaluates_samples_and_compares(command, work, tmp_path):
    root = tmp_path / f"runs {ODD}"
    run = RunDir(root / ODD)
    named = ("-r", "name", ODD, "-r", "run_root", str(root))
    settings = [f"{name}={value}" for name, value in SMALL.items()]
    command("run", *named, "-r", "data", f"data {ODD}", *settings)
    assert state(run) == "finished" and (run.path / "report.html").is_file()

    said = command("run", *named, "resume=latest", "steps=2")
    assert f"resumed from {complete_checkpoints(run)[-2].name}" in said, said
    assert [row["step"] for row in run.read_metrics() if "loss" in row] == [1, 2]

    source, out = ("-r", "source", str(run.path)), f"out {ODD}"
    command("evaluate", *source, "count=1")
    assert "step_000002" in (run.path / "evaluation.jsonl").read_text()
    said = command("sweep", "nope=1", code=2)
    assert said.startswith("sciftune sweep: nothing changes"), said
    command("sample", *source, "seeds=0", "guidance=", "steps=2", "prompts=one", "-r", "out", out)
    assert (work / out / "samples.json").is_file()
    command("compare", "-r", "runs", str(run.path))
    compared = (work / "runs/compare-1.ipynb").read_text()
    assert r"a\\[b\\]{c} 'd'" in compared  # as Markdown, in JSON
    assert not [*root.glob(".*"), *(work / "runs").glob(".*")]
