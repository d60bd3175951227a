"""Take an extra away and check what is left.

    python tests/tools/without.py figures [gate | tests | notebooks]

A copy of the work tree without the extra's notebooks, modules, presets and tests is brought into
step; then the gate, the notebooks and the tests of `scripts/test --quick` run there.
"""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = sorted(path.name for path in (ROOT / "nbs/extras").iterdir() if path.is_dir())
STEPS = {  # of `scripts/test --quick`; files by pattern
    "gate": ["tests/tools/gate.py", "check"],
    "notebooks": ["tests/tools/notebooks.py", "nbs/1_core", "nbs/2_data", "nbs/6_planner/0[1-3]_*"],
    "tests": ["-m", "pytest", "-n", "2", "tests/test_*.py", "tests/processes/test_quick.py"],
}


def copied(extra: str, folder: Path) -> Path:
    """Copy the work tree to `folder` without an extra; the copy is a repository of its own."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        own = {f"{place}/extras/{extra}" for place in ("nbs", "sciftune", "tests")}
        if name and (ROOT / name).is_file() and not any(name.startswith(f"{o}/") for o in own):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(root: Path, *arguments: str) -> int:
    """Run this Python in a copy, whose package it imports; patterns become the files there."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    files = [sorted(map(str, root.glob(a))) if "*" in a else [a] for a in arguments]
    command = [sys.executable, *itertools.chain(*files)]
    return subprocess.run(command, cwd=root, env=environment).returncode


def check(extra: str, steps: list[str]) -> int:
    """Return 0 if a copy without the extra passes the steps."""
    with tempfile.TemporaryDirectory(prefix=f"sciftune-without-{extra}-") as folder:
        root = copied(extra, Path(folder))
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *command], cwd=root, check=True)
        run(root, "tests/tools/gate.py", "sync")
        run(root, "tests/tools/refusals.py")
        subprocess.run(["git", "add", "-A"], cwd=root, check=True)
        return max(run(root, *STEPS[step]) for step in steps)


if __name__ == "__main__":
    extra, *steps = sys.argv[1:] or [""]
    if extra not in EXTRAS or set(steps) - set(STEPS):
        sys.exit(f"usage: without.py {' | '.join(EXTRAS)} [{' | '.join(STEPS)}]")
    sys.exit(check(extra, steps or list(STEPS)))
