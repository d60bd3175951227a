"""Runs started as `launch` starts them, without a plan, and all processes that belong to them."""

import contextlib
import time

import psutil
from shared_figures import share_figures

from sciftune.core.plan import Plan
from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.lab import jobs as launch_jobs
from sciftune.lab import prepare
from sciftune.lab.jobs import job_process
from sciftune.strategies.launch_files import write_configs

MARK = "SCIFTUNE_TEST_OF_OWNERSHIP"  # in the environment of every process of a run
PATIENCE = 1800  # seconds: so long that only what hangs needs them


def wait(ready, seconds=PATIENCE, pause=0.1):
    "Return when `ready()` is true; the deadline is for what hangs."
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(pause)


def living(run):
    "Processes of `run`, found by what they have inherited: also those that nobody knows of."
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get(MARK) == str(run.path)
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def recipe_in(folder, name, **fields):
    "The recipe of the run `name` in `folder`; on the CPU where `cpu` is not said."
    share_figures(folder)
    return resolve(**dict(cpu=True, run_root=str(folder), name=name) | fields)


def begin(recipe):
    "Prepare and start the job of `recipe`, with an empty plan; returns its run folder."
    with stand_ins():
        run = prepare.prepare_run(recipe)
        return launch_jobs.begin(run, **{MARK: str(run.path)})


def unplanned(recipe, plan, check=True, run=None):
    "An empty plan, and the launch files."
    write_configs(recipe, RunDir(plan.parent), run)
    return Plan()


@contextlib.contextmanager
def stand_ins(plan=unplanned):
    "Plan so."
    kept, prepare.plan_run = prepare.plan_run, plan
    try:
        yield
    finally:
        prepare.plan_run = kept


def command_line(process):
    "The command of a process; empty when it has just ended."
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def ranks(run):
    "Ranks of `run`, and the processes that make their batches."
    lines = {p: command_line(p) for p in living(run)}
    trainers = [p for p, line in lines.items() if "sciftune.training.trainer" in line]
    trainers = [p for p in trainers if "sciftune.strategies.agent" not in lines[p]]
    rank = [p for p in trainers if p.ppid() not in {parent.pid for parent in trainers}]
    return rank, [p for p in trainers if p not in rank]


def processes_of(run):
    "The processes of `run` by what they do: agent, rank, worker."
    agent = job_process(run)
    trainers, workers = ranks(run)
    return dict(agent=[agent] if agent else [], rank=trainers, worker=workers)
