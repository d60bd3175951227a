"""Signals to `sciftune run` itself, as a scheduler, a supervisor or a terminal sends them."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from jobs import PATIENCE, wait
from shared_figures import share_figures

from sciftune.core.checkpoint_folders import complete_checkpoints
from sciftune.core.rundir import RunDir
from sciftune.lab.jobs import processes, read_status, state

SMALL = dict(
    preset="tiny",
    name="asked",
    figures=16,
    held_out=4,
    steps=100000,
    validation_steps=0,
    checkpoint_steps=0,
    cpu=True,
)


def heed():
    "A script in the background ignores the one, and nohup the other."
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def command(root, tmp_path):
    "Starts `sciftune run` in a session of its own; ends what is left of it."
    started = []
    share_figures(tmp_path / "runs")

    def start(program=sys.executable, **settings):
        words = [f"{name}={value}" for name, value in (SMALL | settings).items()]
        process = subprocess.Popen(
            [program, "-m", "sciftune.lab.command", "run", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=heed,
        )
        started.append(process)
        return process

    yield start
    run = RunDir(tmp_path / "runs/asked")
    for process in [*started, *processes(run)]:
        process.kill()


def ended(process):
    "(exit code, what it said), when nothing of the command is left."
    children = psutil.Process(process.pid).children(recursive=True)
    said = process.communicate()[0]
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    return process.returncode, said, alive


def planning(process):
    "Whether the command has a child, which plans."
    return bool(psutil.Process(process.pid).children())


def above(run):
    "The processes above the rank of `run`, up to the session of the tests."
    (rank,) = [p for p in processes(run) if p.cmdline()[1:3] == ["-m", "sciftune.training.trainer"]]
    return [p.pid for p in rank.parents()]


def test_a_closed_terminal_leaves_the_job_and_a_scheduler_ends_it(command, tmp_path, warm_python):
    run = RunDir(tmp_path / "runs/asked")
    first = command()
    wait(lambda: run.metrics.exists() or first.poll() is not None)
    assert above(run)[:2] == [read_status(run)["pid"], first.pid]  # agent and command, no more
    first.send_signal(signal.SIGHUP)
    said, code = first.communicate()[0], first.wait()
    assert code == 129 and "interrupted, the run goes on" in said, said
    assert state(run) == "running"

    second = command(warm_python)  # the same words: follows the job
    for line in second.stdout:
        if line.startswith("attached"):
            break
    second.send_signal(signal.SIGTERM)
    code, said, alive = ended(second)
    assert code == 143 and "SIGTERM: the run ends after its step" in said, said
    assert "every process of the run has been ended; this continues it:" in said
    assert state(run) == "stopped" and not processes(run) and not alive
    assert complete_checkpoints(run) and (run.path / "report.html").exists()
    assert not list((tmp_path / "runs").glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_there_is_a_job_no_folder_is_left(command, tmp_path, number):
    process = command()
    wait(lambda: process.poll() is not None or planning(process))
    process.send_signal(number)  # to the command alone, not to its children
    code, said, alive = ended(process)
    assert code == 128 + number and "sciftune run: interrupted" in said, said
    left = {path.name for path in (tmp_path / "runs").iterdir()}
    assert not alive and left <= {"cache"}  # of drawn figures


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), dict(strategy="ddp", num_processes=2)],
)
def test_a_kernel_that_forks_its_ranks_lets_them_save(command, tmp_path, warm_python, settings):
    run = RunDir(tmp_path / "runs/asked")
    process = command(warm_python, launcher="notebook", **settings)
    wait(lambda: run.metrics.exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)  # which goes to the kernel
    code, said, alive = ended(process)
    assert code == 143 and "this continues it:" in said, said
    assert read_status(run)["exit_code"] == 143 and state(run) == "stopped" and not alive
    assert not processes(run)
    assert complete_checkpoints(run), run.log.read_text()
