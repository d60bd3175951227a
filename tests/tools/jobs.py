"""Runs started as `launch` starts them, without a plan, and all processes that belong to them."""

import contextlib
import gc
import multiprocessing
import os
import time

import psutil
from shared_figures import share_figures

from sciftune.core.plan import Plan
from sciftune.core.recipe import Recipe, resolve
from sciftune.core.rundir import RunDir
from sciftune.lab import launch
from sciftune.lab.launch import LaunchFile, job_command, job_process, start
from sciftune.planner import plan as planner
from sciftune.strategies.launch_files import write_configs
from sciftune.training.resumption import check_checkpoint_data

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
        run = launch.prepare_run(recipe)
        file = LaunchFile.load(run)
        start(run, job_command(file.command), file.environment | {MARK: str(run.path)})
    return run


def unplanned(recipe, plan, check=True, run=None):
    "An empty plan, and the launch files."
    write_configs(Recipe.load(recipe), RunDir(plan.parent), run)
    return Plan()


def planned(recipe, plan, check=True, run=None):
    "The plan, made in a process that is forked from this one and so has torch imported."

    def work():
        gc.freeze()
        os._exit(planner.main([recipe, plan, *([run.path] if run else [])]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    return Plan.load(plan)


def compared(recipe_path, checkpoint):
    "Compare the data in this process."
    check_checkpoint_data(Recipe.load(recipe_path), checkpoint)


@contextlib.contextmanager
def stand_ins(plan=unplanned):
    "Plan so; what else needs torch is done in this process, which has imported it already."
    kept = launch.plan_run, launch.check_data
    launch.plan_run, launch.check_data = plan, compared
    try:
        yield
    finally:
        launch.plan_run, launch.check_data = kept


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
    "The processes of `run` by what they do: wrapper, agent, rank, worker."
    wrapper = job_process(run)
    trainers, workers = ranks(run)
    wrappers = [wrapper] if wrapper else []
    agents = wrapper.children() if wrapper else []
    return dict(wrapper=wrappers, agent=agents, rank=trainers, worker=workers)
