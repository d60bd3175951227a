"""A sweep of 2x2 with real processes: killed in its third run, then that run killed, completed."""

import os
import signal
import subprocess
import sys

import nbformat
import psutil
import pytest
from jobs import command_line, wait

from sciftune.core.rundir import RunDir
from sciftune.lab.jobs import state

SMALL = dict(
    preset="tiny",
    figures=16,
    held_out=4,
    steps=120,
    validation_steps=0,
    validation_images=1,
    validation_sample_steps=1,
    checkpoint_steps=20,
    plan_check=False,
    cpu=True,
)
GRID = ["learning_rate=1e-4,1e-3", "seed=1,2"]
NAMES = [f"s_learning_rate-{rate}_seed-{seed}" for rate in ("1e-4", "1e-3") for seed in (1, 2)]


def sweep(folder, root, log):
    "`sciftune sweep` in `folder`; its output goes to a file."
    words = [f"{name}={value}" for name, value in SMALL.items()]
    call = [sys.executable, "-m", "sciftune.lab.command", "sweep", "--name", "s", *GRID, *words]
    with open(log, "w") as out:
        environment = os.environ | {"PYTHONPATH": str(root)}
        return subprocess.Popen(call, cwd=folder, stdout=out, stderr=out, env=environment)


def said(log):
    "What the sweep has said of each run it has come to."
    lines = [line for line in log.read_text().splitlines() if line.startswith("sweep ")]
    return [line.rpartition(": ")[2] for line in lines]


def steps_of(run):
    rows = run.read_metrics() if run.metrics.exists() else []
    return [row["step"] for row in rows if "loss" in row]


def send(run, what):
    "A signal to all processes of the job of `run`, the outermost first."
    found = [p for p in psutil.process_iter() if str(run.path) in " ".join(command_line(p))]
    assert len(found) >= 2
    for process in sorted(found, key=lambda p: p.pid):
        process.send_signal(what)


@pytest.mark.slow  # four runs, started and started again
def test_killed_sweep_is_completed(root, tmp_path):
    runs = [RunDir(tmp_path / "runs" / name) for name in NAMES]
    first, second = tmp_path / "first", tmp_path / "second"
    process = sweep(tmp_path, root, first)
    wait(lambda: len(steps_of(runs[2])) > 30 or process.poll() is not None)
    process.kill()
    send(runs[2], signal.SIGSTOP)  # goes on without its sweep, and does not end meanwhile
    assert said(first) == ["started"] * 3, first.read_text()
    assert [state(run) for run in runs[:2]] == ["finished"] * 2
    ended = [run.status.stat().st_mtime_ns for run in runs[:2]]

    process = sweep(tmp_path, root, second)
    wait(lambda: len(said(second)) == 3 or process.poll() is not None)
    send(runs[2], signal.SIGKILL)
    assert process.wait() == 0, second.read_text()
    assert said(second) == ["has finished"] * 2 + ["is running, followed", "started"]
    assert ended == [run.status.stat().st_mtime_ns for run in runs[:2]]
    assert "resumed from step_0000" in runs[2].log.read_text()
    for run in runs:
        assert state(run) == "finished" and steps_of(run) == list(range(1, SMALL["steps"] + 1))
    compared(tmp_path / "runs/compare-1.ipynb")


def compared(notebook):
    "The comparison names every run and draws curves, the field and pictures."
    cells = [cell for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    shown = [output["data"] for output in outputs if "data" in output]
    tables = [
        data["text/markdown"].replace("\\_", "_") for data in shown if "text/markdown" in data
    ]
    assert any(all(name in table for name in NAMES) for table in tables)
    assert sum("image/png" in data or "image/svg+xml" in data for data in shown) >= 3
