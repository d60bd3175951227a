"""The optimizer's kernel, in Triton's interpreter on the CPU.

The interpreter is chosen when Triton is imported, so that each test is a process of its own.
"""

import os

import pytest


@pytest.fixture
def interpreted(python, root):
    "Run a file of this folder, whose last line says `fine`, with Triton's interpreter."
    pytest.importorskip("triton")
    pytest.importorskip("flashoptim")

    def run(name):
        environment = os.environ | {
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(root),
        }
        r = python(root / "tests/extras/kernels" / name, env=environment)
        assert r.returncode == 0 and "fine" in r.stdout, r.stderr[-3000:]

    return run


def test_kernel_equals_its_definition(interpreted):
    interpreted("adam_definition.py")


def test_one_launch_is_the_updates_one_by_one(interpreted):
    interpreted("adam_launches.py")


def test_states_in_shards_are_those_of_every_rank(interpreted):
    interpreted("shard_states.py")
