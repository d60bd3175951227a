"""Processes of a run end together, and a run folder has one owner; with fresh processes."""

import contextlib
import io
import multiprocessing
import os
import subprocess
import sys
import traceback

import jobs
import pytest
from jobs import living, processes_of, ranks, recipe_in, wait
from PIL import Image

from sciftune.core.ownership import holder
from sciftune.core.plan import Plan
from sciftune.core.processes import DIVERGED
from sciftune.core.recipe import Recipe, resolve
from sciftune.core.rundir import RunDir
from sciftune.lab import prepare
from sciftune.lab.jobs import (
    LaunchError,
    RunFailedError,
    attach,
    job_process,
    read_status,
    start,
    state,
    stop,
)
from sciftune.lab.prepare import prepare_run

ENDLESS = {
    "steps": 10**6,
    "figures": 16,
    "held_out": 4,
    "micro_batch": 2,
    "global_batch": 4,
    "validation_steps": 0,
    "checkpoint_steps": 5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for the runs of this file, so that they share caches."""
    return tmp_path_factory.mktemp("ownership")


def begin(folder, name, **fields):
    """Start an endless run; returns its folder when it has trained a step."""
    run = jobs.begin(recipe_in(folder, name, **ENDLESS | fields))
    wait(lambda: run.metrics.exists() or state(run) != "running")
    assert state(run) == "running", run.log.read_text()
    return run


def listening(run):
    """Addresses at which processes of `run` listen."""
    sockets = [c for p in living(run) for c in p.net_connections() if c.status == "LISTEN"]
    return {c.laddr.ip for c in sockets}


ALONE = {"strategy": "single"}
TWO = {"strategy": "ddp", "num_processes": 2, "data_workers": 1}


@pytest.mark.parametrize(
    "who, fields",
    [
        ("agent", TWO),
        ("rank", TWO),
        pytest.param("worker", TWO, marks=pytest.mark.slow),
        ("agent", ALONE),
    ],
)
def test_nothing_survives_a_kill(folder, who, fields):
    run = begin(folder, f"{who}-{fields['strategy']}", **fields)
    try:
        expected = 3 + 2 if fields is TWO else 2
        assert len(living(run)) == expected, [p.cmdline() for p in living(run)]
        heard = listening(run)  # the store and its ranks, by nobody else than this machine
        assert bool(heard) == (fields is TWO) and heard <= {"127.0.0.1", "::1"}, heard
        processes_of(run)[who][-1].kill()
        wait(lambda: not living(run) and not any(holder(f) for f in run.path.glob("*.lock")))
        assert state(run) == ("killed" if who == "agent" else "failed")
    finally:
        for process in living(run):
            process.kill()


def test_a_second_launch_is_refused_and_says_by_whom(folder, warm_python):
    """By name, with resume=latest, and by a second start of the same folder.

    Also when the agent is stopped and only rank 0 holds the folder.
    """
    run = begin(folder, "owned", **ALONE)
    recipe = Recipe.load(run.recipe)
    try:
        pid = read_status(run)["pid"]
        whose = f"is in use by process {pid} on {os.uname().nodename}, started 20"
        for changes in ({"steps": 7}, {"steps": 7, "resume": "latest"}):
            with pytest.raises(LaunchError, match=whose):
                prepare_run(recipe.model_copy(update=changes))
        with pytest.raises(LaunchError, match=whose):
            start(run, ["true"])
        assert recipe.steps == ENDLESS["steps"] and len(living(run)) == 2
        (rank,), _ = ranks(run)
        (run.path / "launcher.lock").unlink()
        whose = f"is in use by process {rank.pid} on {os.uname().nodename}, started 20"
        with pytest.raises(LaunchError, match=whose):
            start(run, ["true"])
        by_hand = [warm_python, "-m", "sciftune.training.trainer", str(run.recipe)]
        done = subprocess.run(by_hand, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 2, done.stderr
        assert f"FolderInUseError: {run.path} {whose}" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        stop(run)  # agent and rank are asked, and the rank has time
        assert "stopped on request" in run.log.read_text() and not living(run)
        assert state(run) == "stopped"
    finally:
        for process in living(run):
            process.kill()


def test_a_request_to_stop_is_no_crash(folder, capsys, warm_python, monkeypatch):
    """SIGTERM to the job of several processes, as a preemption sends it: a checkpoint, and 143."""
    monkeypatch.setattr(sys, "executable", warm_python)
    run = begin(folder, "preempted", **TWO)
    try:
        job_process(run).terminate()
        wait(lambda: not living(run))
        log = run.log.read_text()
        assert read_status(run)["exit_code"] == 143 and state(run) == "stopped", log
        assert "stopped on request after step" in log and "Traceback" not in log
        attach(run)  # a notebook that looks on sees no failure
        assert "-p name preempted -p resume latest" in capsys.readouterr().out
    finally:
        for process in living(run):
            process.kill()


def test_a_rate_of_five_ends_as_diverged(folder, warm_python, monkeypatch):
    """On two processes, by the exit code of the ranks, with the rate as the first cause."""
    monkeypatch.setattr(sys, "executable", warm_python)
    wild = dict(TWO, learning_rate=5.0, lr_schedule="constant", warmup_steps=0)
    run = jobs.begin(recipe_in(folder, "wild", **ENDLESS | wild))
    wait(lambda: state(run) != "running" or len(run.read_metrics()) > 300)
    try:
        log = run.log.read_text()
        assert state(run) == "diverged" and read_status(run)["exit_code"] == DIVERGED, log
        assert "earning_rate 5 is the first suspect" in log and "wrong sign" not in log
        with pytest.raises(RunFailedError, match="the run diverged: DivergedError"):
            attach(run)
    finally:
        for process in living(run):
            process.kill()


def race(begin, said, **fields):
    """Launch when the others are ready, too, and say what came of it."""
    prepare.plan_run = lambda recipe, plan, check=True, run=None: Plan()  # raced for is the folder
    begin.wait()
    with open(said, "w") as file, contextlib.redirect_stdout(io.StringIO()):
        try:
            run = prepare_run(resolve(name="race", **fields))
            if state(run) == "running":
                file.write("attached")
            else:
                start(run, ["sleep", "600"])
                file.write("started")
        except LaunchError as error:
            file.write(str(error))
        except BaseException:
            traceback.print_exc(file=file)
    os._exit(0)


@pytest.mark.parametrize("steps", [(5, 5, 5), (5, 6, 7)])
def test_one_of_several_launches_at_once_wins(folder, tmp_path, steps):
    """Launches of one name at the same moment, of one recipe or of several.

    One runs, with its own recipe; the others are refused or show its log.
    """
    context = multiprocessing.get_context("fork")
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (64, 64)).save(data / "a.png")
    (data / "a.txt").write_text("a caption")
    for number in range(3):
        root = tmp_path / f"{number}"
        begin = context.Barrier(len(steps))
        racers = [
            context.Process(
                target=race,
                args=(begin, tmp_path / f"{number}-{racer}"),
                kwargs=dict(run_root=str(root), steps=count, data=str(data)),
            )
            for racer, count in enumerate(steps)
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        said = [(tmp_path / f"{number}-{n}").read_text() for n in range(len(steps))]
        run = RunDir(root / "race")
        try:
            assert said.count("started") == 1, said
            assert f"steps: {steps[said.index('started')]}\n" in run.recipe.read_text()
            for words in said:
                refused = "is in use by process" in words or "belongs to another recipe" in words
                assert words in ("started", "attached") or refused, said
                assert "Traceback" not in words
        finally:
            job = job_process(run)
            for process in [*job.children(), job] if job else []:
                process.kill()
