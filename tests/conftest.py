import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 1800  # seconds for a process: so long that only one that hangs needs them
SLOW = "slow: pytest -m slow, or SCIFTUNE_SLOW=1 for everything"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def root():
    return ROOT


@pytest.fixture
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


def pytest_collection_modifyitems(config, items):
    """The file that takes longest comes first, so that two workers end together.

    Slow tests run when asked for: pytest -m slow, or SCIFTUNE_SLOW=1 for everything.
    """
    items.sort(key=lambda item: item.path.name != "test_launch.py")
    if config.getoption("-m") or os.environ.get("SCIFTUNE_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=SLOW))
