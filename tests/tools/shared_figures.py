"""Figures are drawn once for all tests: one takes 0.1 s of a processor, and most runs want some."""

import contextlib
import functools
import hashlib
import os
import pickle
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
    """Let collections of this process, and of those forked from it, take figures drawn before.

    Args:
        folder: where they are kept; '' = as `PLACE` says
    """
    os.environ.setdefault(PLACE, folder)
    with contextlib.suppress(ImportError):  # an extra
        from sciftune.extras.figures import shards

        write, package = shards.write_shard, shards.__name__.rpartition(".")[0]

        def write_shard(path, indices, draw, args):
            ours = draw.__module__.startswith(package)  # a notebook's own is what it tests
            write(path, indices, functools.partial(drawn, draw) if ours else draw, args)

        shards.write_shard = write_shard


def drawn(draw, *args):
    """Return what `draw` returns, from the file of an earlier call."""
    key = hashlib.sha256(repr((draw.__module__, draw.__qualname__, args)).encode()).hexdigest()
    file = Path(os.environ[PLACE]) / f"{key}.pickle"
    if file.exists():
        return pickle.loads(file.read_bytes())
    made = draw(*args)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_bytes(pickle.dumps(made))
    aside.rename(file)
    return made
