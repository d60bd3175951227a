"""Take an extra away and check what is left.

    python tests/tools/without.py figures

A copy of the work tree without the extra's notebooks, modules, presets and tests is brought into
step; then `scripts/test --quick` runs there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = sorted(path.name for path in (ROOT / "nbs/extras").iterdir() if path.is_dir())


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


def run(root: Path, *command: str, **more) -> int:
    """Run a command in a copy, with this Python, which imports the package of the copy.

    It inherits no settings of tests: with SCIFTUNE_SLOW the copy would test copies of its own.
    """
    own = {"PYTHONPATH": str(root), "SCIFTUNE_PYTHON": sys.executable}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SCIFTUNE_")} | own
    return subprocess.run(command, cwd=root, env=environment, **more).returncode


def check(extra: str) -> int:
    """Return 0 if a copy without the extra passes."""
    with tempfile.TemporaryDirectory(prefix=f"sciftune-without-{extra}-") as folder:
        root = copied(extra, Path(folder))
        run(root, "git", "init", "-q", check=True)
        run(root, "git", "add", "-A", check=True)
        run(root, sys.executable, "tests/tools/gate.py", "sync")
        run(root, sys.executable, "tests/tools/refusals.py")
        run(root, "git", "add", "-A", check=True)
        return run(root, "scripts/test", "--quick")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        sys.exit(f"usage: without.py {' | '.join(EXTRAS)}")
    sys.exit(check(sys.argv[1]))
