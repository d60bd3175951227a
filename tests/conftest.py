import atexit
import gc
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from shared_figures import PLACE, draw_once
from used_names import wrong_uses
from warm import Zygote

ROOT = Path(__file__).resolve().parent.parent
ZYGOTE = pytest.StashKey[Zygote]()
PATIENCE = 1800  # seconds for a process: so long that only one that hangs needs them
SLOW = "slow: pytest -m slow, or SCIFTUNE_SLOW=1 for everything"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SCIFTUNE_EARLY", "0")  # forks of `warm_python` inherit no sockets
gc.disable()  # until all is imported, see pytest_collection_finish
if PLACE not in os.environ:
    os.environ[PLACE] = tempfile.mkdtemp(prefix="sciftune-figures-")
    atexit.register(shutil.rmtree, os.environ[PLACE], ignore_errors=True)


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def python():
    "Run this Python, or `program`, in a fresh process; its end, with its output as text."

    def call(*arguments, program=sys.executable, **kw):
        return subprocess.run(
            [program, *map(str, arguments)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=kw.pop("timeout", PATIENCE),
            **kw,
        )

    return call


@pytest.fixture(scope="session")
def warm_python(pytestconfig):
    "A program in the place of Python, which starts commands quickly; see tests/tools/warm.py."
    zygote = pytestconfig.stash.get(ZYGOTE, None)
    return str(zygote.program) if zygote else sys.executable


def pytest_collection_modifyitems(config, items):
    """Slow tests run when asked for: pytest -m slow, or SCIFTUNE_SLOW=1 for everything.

    Those that are skipped must at least name what is there and call it as it is defined.
    """
    if config.getoption("-m") or os.environ.get("SCIFTUNE_SLOW"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    for item in slow:
        item.add_marker(pytest.mark.skip(reason=SLOW))
    for module in {item.module for item in slow}:
        if wrong := wrong_uses(inspect.getsource(module), vars(module)):
            raise pytest.UsageError("\n".join([module.__file__, *wrong]))


def pytest_collection_finish(session):
    """Collections leave alone what was imported: each took most of a second to search it.

    The process of `warm_python` is forked before any test has run: it has nothing of them.
    """
    draw_once()
    wanted = any("warm_python" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly and hasattr(os, "pidfd_open"):  # Linux
        session.config.stash[ZYGOTE] = zygote = Zygote()
        zygote.start()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config):
    """What was frozen is freed at the end, or libraries complain of leaks."""
    if zygote := config.stash.get(ZYGOTE, None):
        zygote.stop()
    gc.unfreeze()
