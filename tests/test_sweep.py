"""A sweep finds a good point, ends a bad one early, and goes on where it was, without training."""

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from sciftune.core.recipe import Recipe
from sciftune.core.rundir import RunDir
from sciftune.lab import jobs, sweep
from sciftune.lab.compare import results_table
from sciftune.lab.jobs import LaunchError, state


def status_of(run, process, **more):
    """Write what a job says of itself."""
    created = psutil.Process(process.pid).create_time()
    host = os.uname().nodename
    run.status.write_text(json.dumps(dict(pid=process.pid, created=created, host=host) | more))


class Launches:
    """Pretended launches: the held-out loss of a run falls by a rule, in a process that waits."""

    def __init__(self, root):
        self.root, self.names, self.best = root, [], 0.0

    def gain(self, recipe):
        """The best rate is 1e-4."""
        return math.exp(-(math.log10(recipe.learning_rate / 1e-4) ** 2))

    def __call__(self, words):
        settings = dict(zip(words[1::3], words[2::3], strict=True))
        run = RunDir(self.root / settings["name"])
        self.names.append(settings["name"])
        run.path.mkdir(exist_ok=True)
        recipe = Recipe(learning_rate=float(settings["learning_rate"]), steps=20)
        recipe.save(run.recipe)
        seconds = 0 if self.gain(recipe) >= 0.5 * self.best else 60  # unless it is ended early
        self.best = max(self.best, self.gain(recipe))
        code = f"import time; time.sleep({seconds})"
        process = subprocess.Popen([sys.executable, "-S", "-c", code])
        status_of(run, process)
        for step in (0, 10):
            run.append_metrics(dict(step=step, held_out=1 - self.gain(recipe) * step / 20))
        if process.wait() == 0:
            run.append_metrics(dict(step=20, held_out=1 - self.gain(recipe)))
        ended = process.returncode
        run.status.write_text(json.dumps(dict(pid=process.pid, exit_code=ended)))
        return 128 - ended if ended else 0


@pytest.mark.parametrize("search", ["grid", "random", "optuna"])
def test_a_bad_point_ends_early_and_the_same_command_does_nothing_more(
    search, tmp_path, monkeypatch, capsys
):
    if search == "optuna":
        pytest.importorskip("optuna", reason="no optuna (pip install 'sciftune[sweep]')")
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.05)
    rates = ["1e-4", "3e-4", "1e-1"] if search == "grid" else ["1e-6..1e-1"]
    choices = dict(run_root=[str(tmp_path)], learning_rate=rates)
    launches = Launches(tmp_path)
    points = sweep.SEARCHES[search]("s", choices, 6)
    assert sweep.run_points(points, launches, 0.5) == 0
    first, runs = list(launches.names), list(points.runs)
    assert len(first) == len(points) == (3 if search == "grid" else 6)
    ends = [state(run) for run in runs]
    assert {"finished", "stopped"} <= set(ends)
    text = str(results_table(runs))
    assert text.count("ended early:") == ends.count("stopped")
    assert max(map(len, text.splitlines())) <= 100
    assert "ended early: held-out loss fell by" in capsys.readouterr().out

    again = sweep.SEARCHES[search]("s", choices, 6)
    assert sweep.run_points(again, launches, 0.5) == 0
    assert launches.names == first  # nothing was launched again
    assert [run.path for run in again.runs] == [run.path for run in runs]
    longer = sweep.SEARCHES[search]("s", choices, 8)  # more trials go on from there
    if search != "grid":
        assert sweep.run_points(longer, launches, 0.5) == 0
        assert launches.names[:6] == first and len(launches.names) == 8


def test_an_interrupted_sweep_does_not_count_as_pruned(tmp_path):
    launches = Launches(tmp_path)
    choices = dict(run_root=[str(tmp_path)], learning_rate=["1e-4", "3e-4"])
    assert sweep.run_points(sweep.Points("s", choices), lambda words: launches(words) or 130) == 130
    assert len(launches.names) == 1
    assert not sweep.pruned_reason(RunDir(tmp_path / launches.names[0]))


def test_a_point_that_is_no_recipe_is_one_failure_of_a_chosen_search(tmp_path, capsys):
    """A grid is checked before its first run; a chosen point is told as failed."""
    pytest.importorskip("optuna", reason="no optuna (pip install 'sciftune[sweep]')")
    choices = dict(run_root=[str(tmp_path)], learning_rate=["1e-4", "none", "1e-3"])
    launches = Launches(tmp_path)
    for trained in (2, 2):  # a repeat has the same points and trains none
        points = sweep.OptunaPoints("s", choices, 3)
        assert sweep.run_points(points, launches) == 1
        assert len(points.runs) == len(launches.names) == trained
        said = capsys.readouterr().out
        assert "s_learning_rate-none: is no recipe: learning_rate:" in said
        assert "1 of 3 failed: s_learning_rate-none" in said
    with pytest.raises(LaunchError, match="learning_rate"):
        sweep.run_points(sweep.Points("s", choices), launches)


def told(search, losses):
    """The names of the points of a search whose losses are told, nan = failed."""
    names = []
    for point, loss in zip(search, losses, strict=False):
        names.append(point.name)
        search.tell(loss, 10, "finished")
    return names


@pytest.mark.parametrize("seed", range(3))
def test_chosen_points_come_once_and_again_after_a_resume(seed, tmp_path):
    pytest.importorskip("optuna", reason="no optuna (pip install 'sciftune[sweep]')")
    few = dict(seed=["1", "2", "3"], lora_rank=["4", "8", "16"])
    names = told(sweep.OptunaPoints("s", few, 20, seed), [0.1 * i for i in range(20)])
    assert len(names) == len(set(names)) == 9  # of nine combinations

    wide = dict(learning_rate=["1e-6..1e-2"], lora_rank=["4", "8", "16"])

    def search(file, choices=wide):
        points = sweep.OptunaPoints("s", choices, 16, seed)
        points.kept = tmp_path / file
        return points

    losses = [math.sin(7 * i) for i in range(16)]
    whole = told(search("whole"), losses)
    failed = [math.nan if i in (2, 5, 9) else loss for i, loss in enumerate(losses)]
    before = told(search("resumed"), failed[:12])
    resumed = told(search("resumed"), losses)  # what failed finishes now
    assert resumed[:12] == before and len(set(resumed)) == 16
    assert told(search("resumed"), losses) == resumed
    told(search("whole"), losses[:7])
    assert told(search("whole"), losses) == whole  # stopped and resumed, or not
    others = told(search("whole", wide | dict(lora_rank=["32", "64"])), losses)
    assert not set(others) & set(whole)  # points of other choices are not taken


def pretended(run, **status):
    """A run folder that is said to have been ended early."""
    run.path.mkdir(exist_ok=True)
    run.status.write_text(json.dumps(status))
    (run.path / sweep.PRUNED).write_text("too slow")
    return run


def test_an_interrupt_after_an_early_end_interrupts_the_sweep(tmp_path):
    choices = dict(run_root=[str(tmp_path)], learning_rate=["1e-4", "3e-4"])
    for code, ended, count in ((130, 130, 1), (129, 129, 1), (143, 0, 2)):
        names = []

        def launch(words, code=code, names=names):
            names.append(words[words.index("name") + 1])
            pretended(RunDir(tmp_path / names[-1]), pid=1, exit_code=143)
            return code

        assert sweep.run_points(sweep.Points(f"s{code}", choices), launch) == ended
        assert len(names) == count


@pytest.mark.parametrize("kills", [1, 2])
def test_a_run_that_is_killed_while_it_is_followed_is_resumed_once(kills, tmp_path, capsys):
    points = sweep.Points("s", dict(run_root=[str(tmp_path)], seed=["1", "2"]))
    run, other = (RunDir(tmp_path / f"s_seed-{seed}") for seed in (1, 2))
    for folder in (run, other):
        folder.path.mkdir()
        folder.append_metrics(dict(step=1, loss=1.0))
    other.status.write_text('{"pid": 1, "exit_code": 0}')
    launched = []

    def launch(words):
        launched.append("resume" in words)
        if len(launched) > kills:
            run.status.write_text('{"pid": 1, "exit_code": 0}')
            return 0
        process.kill()
        process.wait()
        return 1

    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    status_of(run, process)
    assert sweep.run_points(points, launch) == kills - 1
    assert launched == [True, True]
    said = capsys.readouterr().out
    assert "s_seed-1: is running, followed" in said and "s_seed-1 was killed, resumed" in said


def test_a_run_that_trains_in_the_sweep_s_own_process_is_not_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.01)
    good, poor = RunDir(tmp_path / "good"), RunDir(tmp_path / "poor")
    for run, losses in ((good, (1.0, 0.5)), (poor, (1.0, 1.0))):
        run.path.mkdir()
        for i, loss in enumerate(losses):
            run.append_metrics(dict(step=10 * i, held_out=loss))
    asked = []
    monkeypatch.setattr(psutil.Process, "terminate", lambda self: asked.append(self))
    status_of(poor, psutil.Process(), launcher="notebook")
    with sweep.pruned(poor, [good], 0.5):
        time.sleep(0.2)
    assert not asked and not (poor.path / sweep.PRUNED).exists()
    status_of(poor, psutil.Process().parent())
    with sweep.pruned(poor, [good], 0.5):
        time.sleep(0.2)
    assert asked and (poor.path / sweep.PRUNED).exists()


def test_a_launch_forgets_an_early_end(tmp_path, monkeypatch):
    run = pretended(RunDir(tmp_path / "run"), pid=1, exit_code=143)
    assert sweep.pruned_reason(run)
    Recipe().save(run.recipe)
    run.command.write_text("")
    monkeypatch.setattr(jobs.Plan, "load", lambda _: SimpleNamespace(timing=str))
    monkeypatch.setattr(jobs, "launch_here", lambda run: None)
    jobs.launch(run, "notebook")
    assert not sweep.pruned_reason(run)
