"The kernels of blocks, in the interpreter of Triton, which is chosen when it is imported."

import os

import pytest


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_blocks_with_kernels_equal_the_models_own(python, root, cases):
    pytest.importorskip("triton")
    environment = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(root))
    r = python(root / "tests/extras/kernels/block_kernels.py", cases, env=environment)
    assert r.returncode == 0 and "fine" in r.stdout, r.stderr[-3000:]
