"""What extras add to tables that all tests share: tests/extras/<extra>/additions.py."""

import runpy
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "extras"


def added(name: str) -> list:
    """The value of `name` in the additions of every extra that has it."""
    files = sorted(FOLDER.glob("*/additions.py"))
    return [values[name] for values in map(runpy.run_path, map(str, files)) if name in values]
