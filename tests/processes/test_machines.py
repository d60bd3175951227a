"""Two machines: two network namespaces with a cable between them, and the commands of command.txt.

One machine is killed; the other ends, says why and leaves nothing; both go on.
"""

import contextlib
import os
import shlex
import signal
import subprocess

import psutil
import pytest
from forked import losses, train
from jobs import recipe_in, wait

from sciftune.core.rundir import RunDir
from sciftune.strategies.launch_files import write_configs

ADDRESSES = ("10.213.0.1", "10.213.0.2")
PATIENCE = 600  # seconds: so long that only what hangs needs them, and less than gloo waits
STEPS = 12
KILLED_AFTER = 4
FIELDS = dict(
    strategy="ddp",
    steps=STEPS,
    figures=16,
    held_out=0,
    micro_batch=1,
    global_batch=2,
    validation_steps=0,
    checkpoint_steps=2,
    lr_schedule="constant",
)


def call(*words):
    """Run a command of the system."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def machines():
    """Names of two namespaces that reach each other and nothing else."""
    names = [f"sciftune{os.getpid()}-{number}" for number in (0, 1)]
    ends = [f"sf{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            call("ip", "netns", "add", name)
        call("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            call("ip", "link", "set", end, "netns", name, "name", "eth0")
            call(*inside, "address", "add", f"{address}/24", "dev", "eth0")
            call(*inside, "link", "set", "eth0", "up")
            call(*inside, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(names)
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
    yield names
    remove(names)


def remove(names):
    """End what runs in the namespaces, and the namespaces."""
    for name in names:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            kill(name)
            call("ip", "netns", "delete", name)


def processes(machine):
    """Everything that runs on a machine."""
    found = [int(pid) for pid in call("ip", "netns", "pids", machine).split()]
    return [pid for pid in found if psutil.pid_exists(pid)]


def kill(machine):
    """All its processes at once, as when the power goes."""
    for pid in processes(machine):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def command(run, launcher, rank, resumed=False):
    """The line of command.txt under a heading, for the machine with this rank."""
    lines = run.command.read_text().splitlines()
    (heading,) = [number for number, line in enumerate(lines) if line.startswith(f"# {launcher}")]
    line = lines[heading + 1]
    option = dict(torchrun="--node_rank", accelerate="--machine_rank")[launcher]
    assert f"{option} 0 " in line, line
    line = line.replace(f"{option} 0 ", f"{option} {rank} ")
    return line.replace(str(run.recipe), str(run.resumed_recipe)) if resumed else line


@pytest.fixture
def scripts(warm_python, tmp_path):
    """A folder with the launchers of command.txt, for PATH."""
    modules = dict(
        torchrun="torch.distributed.run", accelerate="accelerate.commands.accelerate_cli"
    )
    for name, module in modules.items():
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(warm_python)} -m {module} "$@"\n')
        script.chmod(0o755)
    return script.parent


def begin(machines, scripts, run, launcher, resumed=False):
    """Type the line on each machine; the started shells and their logs."""
    environment = os.environ | dict(GLOO_SOCKET_IFNAME="eth0")
    environment["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    started = []
    for rank, name in enumerate(machines):
        line = command(run, launcher, rank, resumed)
        log = open(run.path / f"{launcher}_{rank}.txt", "w")  # noqa: SIM115
        words = ["ip", "netns", "exec", name, "bash", "-c", line]
        shell = subprocess.Popen(
            words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
        )
        started.append(shell)
    return started


def ended(shells):
    """Whether one of them has."""
    return any(shell.poll() is not None for shell in shells)


def said(run, launcher, rank):
    """What a machine has printed."""
    return (run.path / f"{launcher}_{rank}.txt").read_text()


def test_one_machine_is_killed_and_both_go_on(machines, scripts, tmp_path):
    recipe = recipe_in(
        tmp_path,
        "run",
        num_machines=2,
        num_processes=2,
        main_process_ip=ADDRESSES[0],
        resume="",
        **FIELDS,
    )
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_configs(recipe, run)

    shells = begin(machines, scripts, run, "torchrun")
    saved = run.checkpoints / f"step_{KILLED_AFTER:06d}"
    wait(lambda: ended(shells) or saved.exists(), PATIENCE)
    assert not ended(shells), said(run, "torchrun", 0) + said(run, "torchrun", 1)
    kill(machines[1])
    wait(lambda: not processes(machines[0]) and not processes(machines[1]), PATIENCE)
    assert shells[0].wait() not in (0, None)
    text = said(run, "torchrun", 0)
    assert "another machine" in text, text[-4000:]
    assert len(losses(run.read_metrics())) < STEPS

    shells = begin(machines, scripts, run, "accelerate", resumed=True)
    codes = [shell.wait(PATIENCE) for shell in shells]
    assert codes == [0, 0], said(run, "accelerate", 0) + said(run, "accelerate", 1)
    assert "resumed from step_" in said(run, "accelerate", 0)
    assert not processes(machines[0]) and not processes(machines[1])
    assert (run.model / "model_index.json").is_file()

    alone = RunDir(tmp_path / "alone")
    reference = losses(train(alone, **FIELDS | dict(strategy="single")))
    found = losses(run.read_metrics())
    assert list(found) == list(range(1, STEPS + 1))
    assert all(abs(found[step] - reference[step]) < 1e-4 * reference[step] for step in reference)
