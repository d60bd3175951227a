import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 1800  # seconds for a process: so long that only one that hangs needs them
LONGEST = (
    "families",
    "engines",
    "ownership",
    "requests",
    "launch",
    "unified",
    "distill",
    "machines",
    "package",
    "lora",
    "context",
    "buckets",
)
SLOW = "slow: pytest -m slow, or SCIFTUNE_SLOW=1 for everything"
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all is imported, see pytest_collection_finish
FIGURES = "SCIFTUNE_TEST_FIGURES"  # where tests/tools/shared_figures.py keeps them
if FIGURES not in os.environ:  # the workers of xdist inherit it
    os.environ[FIGURES] = tempfile.mkdtemp(prefix="sciftune-figures-")
    atexit.register(shutil.rmtree, os.environ[FIGURES], ignore_errors=True)


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def python():
    "Run this Python in a fresh process; gives the finished process, output as text."

    def call(*arguments, **kw):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=kw.pop("timeout", PATIENCE),
            **kw,
        )

    return call


@pytest.fixture(scope="session")
def warm_python():
    "A program in the place of Python, which starts commands quickly; see tests/tools/warm.py."
    from warm import Zygote

    if not hasattr(os, "pidfd_open"):  # not Linux
        yield sys.executable
        return
    zygote = Zygote()
    zygote.start()
    yield str(zygote.program)
    zygote.stop()


def pytest_collection_modifyitems(config, items):
    """The files that take longest come first, so that two workers end together.

    Slow tests run when asked for: pytest -m slow, or SCIFTUNE_SLOW=1 for everything.
    """
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if config.getoption("-m") or os.environ.get("SCIFTUNE_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=SLOW))


def pytest_collection_finish(session):
    """Collections leave alone what was imported: each took most of a second to search it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config):
    """What was frozen is freed at the end, or libraries complain of leaks."""
    gc.unfreeze()
