"""A command starts its ranks before it plans: they train, or end without a trace."""

import json
import os

import psutil
import pytest
from jobs import wait

from sciftune.lab import prepare
from sciftune.lab.command import train_command
from sciftune.lab.jobs import LaunchError

TINY = ("model_path=tiny", "cpu=True", "steps=1", "validation_steps=0")


def processes_at(place):
    "The commands of processes that name a place."
    lines = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]))
    return [" ".join(line) for line in lines if str(place) in " ".join(line)]


def test_refused_plan_ends_the_ranks(tmp_path, monkeypatch):
    seen = []

    def refuse(*_):
        wait(lambda: any("sciftune.training.trainer" in p for p in processes_at(tmp_path)[1:]))
        seen.extend(processes_at(tmp_path))
        raise LaunchError("it does not fit")

    monkeypatch.delenv("SCIFTUNE_EARLY", raising=False)
    monkeypatch.setattr(prepare, "plan_run", refuse)
    with pytest.raises(LaunchError, match="does not fit"):
        train_command([f"run_root={tmp_path}", *TINY])
    assert len(seen) == 2, "an agent and a rank"
    wait(lambda: not processes_at(tmp_path))
    left = [path.name for path in tmp_path.glob("*") if path.name != "cache"]
    assert not left


@pytest.mark.slow
def test_ranks_of_torchrun_wait_too(tmp_path, python):
    words = (f"run_root={tmp_path}", *TINY, "strategy=ddp", "num_processes=2", "global_batch=8")
    environment = {name: os.environ[name] for name in os.environ if name != "SCIFTUNE_EARLY"}
    done = python("-m", "sciftune.lab.command", "run", *words, env=environment)
    assert done.returncode == 0, done.stderr
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    rows = map(json.loads, metrics.read_text().splitlines())
    (launch,) = (row for row in rows if row.get("event") == "launch")
    assert [*launch["seconds"]][:4] == ["command", "launcher", "imports", "plan"]
