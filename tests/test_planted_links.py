"""Files are written beside their place under names at which nobody can put a link beforehand.

Each writer runs twice. What its first run opened for writing or renamed is known then; a link to a
file of somebody else is put at every such place, and the second run must not write through it.
"""

import ast
import io
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from additions import added
from PIL import Image

import sciftune
from sciftune.core import secrets
from sciftune.core.plan import Plan
from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.data.cache import save_shard
from sciftune.data.sources import _write_quarantine, joined_quarantine
from sciftune.lab import report
from sciftune.strategies.agent import write_status
from sciftune.training.encoding import _write_thumbnail
from sciftune.training.heartbeat import Heartbeat
from sciftune.training.validation import save_image

PACKAGE = Path(sciftune.__file__).parent
WRITING = os.O_WRONLY | os.O_RDWR
places = set()  # That were opened for writing or renamed


def _note(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        places.add(arguments[0])
    elif event == "os.rename":
        places.update(arguments[:2])


sys.addaudithook(_note)  # Python cannot take it back


def write_secrets(folder):
    """Keep an address with a password."""
    with patch.dict(os.environ, XDG_STATE_HOME=str(folder)):
        secrets.keep_secrets(folder, [secrets.conceal("https://a:secret@example.org/x")])


def write_report(folder):
    """Make the notebook of an empty run, without executing it."""
    with patch.multiple(report, nbconvert=lambda *_: None, write_page=lambda _: None):
        report.run_report(RunDir(folder))


def write_quarantine(folder):
    """Join what two collections set aside."""
    with joined_quarantine(folder / "quarantine.jsonl", 2) as asides:
        for aside in asides:
            _write_quarantine(aside, [dict(source="a.png", reason="it is cut off")])


def write_thumbnail(folder):
    """Draw a small image."""
    drawn = io.BytesIO()
    Image.new("RGB", (8, 8)).save(drawn, "PNG")
    _write_thumbnail(drawn.getvalue(), folder / "00.png", 4)


WRITERS = dict(
    recipe=lambda folder: resolve(cpu=True).save(folder / "recipe.yaml"),
    plan=lambda folder: Plan().save(folder / "plan.json"),
    status=lambda folder: write_status(folder / "status.json", pid=1),
    picture=lambda folder: save_image(torch.zeros(3, 8, 8), folder / "00.png"),
    thumbnail=write_thumbnail,
    shard=lambda folder: save_shard(folder, "shard-a", dict(k=dict(x=torch.zeros(3)))),
    secrets=write_secrets,
    heartbeat=lambda folder: Heartbeat(folder, 0, 600).close(),
    report=write_report,
    quarantine=write_quarantine,
)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_is_not_followed(writer, tmp_path):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    places.clear()
    WRITERS[writer](folder)
    written = {Path(os.fsdecode(p)) for p in places if isinstance(p, (str, bytes, os.PathLike))}
    inside = {path for path in written if path.is_relative_to(folder)}
    assert inside
    for path in sorted(inside, reverse=True):  # what lies in a folder before the folder
        if not path.is_dir():
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(victim)
    WRITERS[writer](folder)
    assert victim.read_text() == "precious", sorted(inside)


RENAMERS = {  # Others than core/writing.py -> why
    "core/ownership.py": "folders with names drawn at random",
    "data/cache.py": "out of a folder with a name drawn at random",
    "core/rundir.py": "folders with names drawn at random",
    "training/checkpoints.py": "a checkpoint that comes back to its name",
    "project/site.py": "within a folder that it has made anew",
    "lab/command.py": "out of a temporary folder",
}


def renames(tree):
    """Calls that give a file another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_path = len(node.args) == 1 and not node.keywords  # str.replace has two
            of_path = of_path or ast.unparse(node.func.value) in ("os", "shutil")
            if of_path and node.func.attr in ("replace", "rename", "move"):
                yield node


def test_files_are_renamed_in_one_place():
    modules = {str(p.relative_to(PACKAGE)): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}
    files = {name for name, tree in modules.items() if any(renames(tree))}
    of_extras = {name for table in added("RENAMERS") for name in table}
    assert files == {"core/writing.py", *RENAMERS, *of_extras}, (
        "use written_aside of sciftune.core.writing"
    )
