"""`scripts/verify_resume` on the stand-in: killed with one engine, resumed with another."""

import subprocess

import pytest
from shared_figures import share_figures

COMMAND = "import sys; from sciftune.lab.prove import prove_command; prove_command(sys.argv[1:])"
FIELDS = dict(
    preset="tiny",
    cpu=True,
    steps=40,
    figures=16,
    held_out=4,
    micro_batch=1,
    global_batch=2,
    validation_steps=0,
    checkpoint_steps=4,
    lr_schedule="constant",
    plan_check=False,
)


@pytest.fixture
def prove(tmp_path, warm_python):
    "The command; returns the finished process."
    share_figures(tmp_path)

    def run(*options):
        words = [word for name, value in FIELDS.items() for word in ("-p", name, str(value))]
        words += ["-p", "run_root", str(tmp_path), *options]
        return subprocess.run([warm_python, "-c", COMMAND, *words], capture_output=True, text=True)

    return run


def test_resumed_by_another_engine(prove):
    done = prove("--resume-with", "strategy", "ddp", "--resume-with", "num_processes", "2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "with strategy ddp, num_processes 2: 80 numbers compared, 0 missing" in done.stdout
    assert "(resumed)" in done.stdout and "equal within 1e-05" in done.stdout
    again = prove()  # the folders are in use
    assert again.returncode == 1 and "has been trained already" in again.stderr
    assert "Traceback" not in again.stderr
