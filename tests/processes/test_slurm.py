"""The Slurm script, run by a shell with a stand-in for srun: a requeued job goes on."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from forked import losses
from shared_figures import share_figures

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.strategies.launch_files import write_configs

SMALL = {
    "cpu": True,
    "figures": 16,
    "held_out": 4,
    "micro_batch": 2,
    "global_batch": 4,
    "validation_steps": 0,
    "checkpoint_steps": 2,
    "lr_schedule": "constant",
    "checkpoints_kept": 9,
    "export": False,
}


def submit(run, warm_python, **environment):
    "Start the script as Slurm's shell would, on a machine whose srun runs its arguments here."
    programs = run.path.parent / "programs"
    programs.mkdir(exist_ok=True)
    # a step of Slurm is a session of its own, and a signal to srun goes to its processes
    step = """
import os, signal, subprocess, sys
step = subprocess.Popen(sys.argv[1:], start_new_session=True)
signal.signal(signal.SIGUSR1, lambda *_: os.killpg(step.pid, signal.SIGUSR1))
sys.exit(step.wait())
"""
    for name, line in {
        "python": f'{shlex.quote(warm_python)} "$@"',
        "srun": f'{shlex.quote(sys.executable)} -c {shlex.quote(step)} "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\nexec {line}\n")
        (programs / name).chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_NODEID": "0"}
    return subprocess.Popen(
        ["bash", str(run.slurm)],
        env=os.environ | path | environment,
        cwd=run.path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("fields", [{}, {"strategy": "ddp", "num_processes": 2}])
def test_a_requeued_job_goes_on(tmp_path, warm_python, fields):
    run = RunDir(tmp_path / "a run; with $(signs)")
    run.path.mkdir()
    share_figures(tmp_path)
    endless = resolve(run_root=str(tmp_path), name=run.path.name, steps=10**6, **SMALL | fields)
    write_configs(endless, run)
    first = submit(run, warm_python)
    while not (run.checkpoints / "step_000002").exists():
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.1)
    first.send_signal(signal.SIGUSR1)  # as Slurm does before the end, to the script alone
    said, _ = first.communicate()
    assert first.returncode == 0 and "stopped on request after step" in said, said
    before = losses(run.read_metrics())
    last = max(before)
    assert (run.checkpoints / f"step_{last:06d}" / "info.json").is_file()

    write_configs(endless.model_copy(update={"steps": last + 2}), run)
    second = submit(run, warm_python, SLURM_RESTART_COUNT="1")
    said, _ = second.communicate()
    assert second.returncode == 0 and f"resumed from step_{last:06d}" in said, said
    after = losses(run.read_metrics())
    assert sorted(after) == list(range(1, last + 3))
    assert {step: after[step] for step in before} == before
    assert (run.checkpoints / "step_000002" / "info.json").is_file()
