"""A sweep finds a good point, ends a bad one early, and goes on where it was, without training."""

import json
import math
import os
import subprocess
import sys

import psutil
import pytest

from sciftune.core.recipe import Recipe
from sciftune.core.rundir import RunDir
from sciftune.lab import sweep
from sciftune.lab.compare import results_table
from sciftune.lab.jobs import state


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
