"""What many tests make alike is made once for all of them, in a folder of this session.

A figure takes 0.1 s of a processor, and most runs want some; a plan measures each kind of block of
a model, which takes as long.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import sys
from pathlib import Path

from sciftune.core.rundir import cache_root

PLACE = "SCIFTUNE_TEST_FIGURES"  # set by tests/conftest.py for one session


def share_figures(
    run_root: str | Path,  # Recipe.run_root
) -> None:
    """Let the runs of `run_root` find the figures that other tests have drawn."""
    figures = cache_root(run_root) / "figures"
    if PLACE in os.environ and not figures.exists():
        figures.symlink_to(os.environ[PLACE])


def draw_once(folder: str = "") -> None:
    """Let this process, and those forked from it, take figures and bytes of blocks made before.

    Args:
        folder: where they are kept; '' = as `PLACE` says
    """
    os.environ.setdefault(PLACE, folder)
    if trace := sys.modules.get("sciftune.planner.trace"):
        trace._MEASURED_BLOCKS = MeasuredBlocks()
    with contextlib.suppress(ImportError):  # an extra
        from sciftune.extras.figures import dialogues, shards

        if shards.write_shard.__module__ == __name__:
            return  # of the process that this one was forked from
        dialogues.dialogue_records = functools.partial(drawn, dialogues.dialogue_records)
        write, package = shards.write_shard, shards.__name__.rpartition(".")[0]

        def write_shard(path, indices, draw, args):
            ours = draw.__module__.startswith(package)  # a notebook's own is what it tests
            write(path, indices, functools.partial(drawn, draw) if ours else draw, args)

        shards.write_shard = write_shard


class MeasuredBlocks(dict):
    """Bytes of blocks that this process or another one has measured, by what decides them."""

    def file(self, kind) -> Path:
        """Where the bytes of a block are kept."""
        key = hashlib.sha256(repr(kind).encode()).hexdigest()
        return Path(os.environ[PLACE]) / f"{key}.block"

    def __contains__(self, kind) -> bool:
        return self.file(kind).exists()

    def __getitem__(self, kind) -> dict:
        return pickle.loads(self.file(kind).read_bytes())

    def __setitem__(self, kind, measured: dict):
        write_whole(self.file(kind), measured)


def write_whole(file: Path, value) -> None:
    """Write a file that another process finds whole or not at all."""
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_bytes(pickle.dumps(value))
    aside.rename(file)


def drawn(draw, *args, **named):
    """Return what `draw` returns, from the file of an earlier call."""
    call = draw.__module__, draw.__qualname__, args, named
    key = hashlib.sha256(repr(call).encode()).hexdigest()
    file = Path(os.environ[PLACE]) / f"{key}.pickle"
    if file.exists():
        return pickle.loads(file.read_bytes())
    made = draw(*args)
    write_whole(file, made)
    return made
