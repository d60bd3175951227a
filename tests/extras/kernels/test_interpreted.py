"""The kernels, in Triton's interpreter on the CPU.

The interpreter is chosen when Triton is imported, so that one process, which has imported no more
than Python, is needed; it forks one for each file.
"""

import os

import pytest

ALL = "all" if os.environ.get("SCIFTUNE_SLOW") else "some"
FILES = dict(adam_definition=(), adam_launches=(), shard_states=(), block_kernels=(ALL,))
RUN = """
import os, runpy, sys

import sciftune.extras.kernels.adam, sciftune.extras.kernels.layers, sciftune.strategies.ddp
import sciftune.models.flux1, sciftune.models.flux2, sciftune.models.qwenimage
import sciftune.project.ranks, sciftune.strategies.compilation

folder, out, *files = sys.argv[1:]
for words in map(str.split, files):
    child = os.fork()
    if not child:
        said = os.open(f"{out}/{words[0]}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.argv = words
        sys.path.insert(0, folder)
        runpy.run_path(f"{folder}/{words[0]}.py", run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def said(python, root, tmp_path_factory):
    """Folder with what each of `FILES` has said."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("flashoptim")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with NumPy 2.4")
    out = tmp_path_factory.mktemp("interpreted")
    environment = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(root))
    calls = [" ".join((name, *words)) for name, words in FILES.items()]
    done = python("-c", RUN, root / "tests/extras/kernels", out, *calls, env=environment)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_kernels_is_fine(said, file):
    """The last line says `fine`."""
    text = (said / file).read_text()
    assert text.rstrip().rpartition("\n")[2].startswith("fine"), text[-3000:]
