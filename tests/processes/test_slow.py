"""A slow disk is not taken for a rank that hangs, and a writer that hangs is still found."""

import time
from contextlib import contextmanager

import pytest
from forked import log, losses, start, wait
from torch.distributed.checkpoint import filesystem

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.data import sources
from sciftune.training import export

STALL = 10  # seconds, the least that a recipe may say
SLOW = {
    "model": "sd15",
    "cpu": True,
    "steps": 2,
    "figures": 32,
    "held_out": 4,
    "micro_batch": 2,
    "global_batch": 4,
    "validation_steps": 0,
    "checkpoint_steps": 0,
    "strategy": "ddp",
    "num_processes": 2,
    "stall_seconds": STALL,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for the runs of this file, so that they share caches."""
    return tmp_path_factory.mktemp("slow")


class DelayedFile:
    """A file that waits before each of its first writes."""

    def __init__(self, file, pauses):
        self.file, self.pauses = file, iter(pauses)

    def write(self, data):
        time.sleep(next(self.pauses, 0))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def delayed(pauses):
    "Let the files of checkpoints and exports wait so long before their writes."
    real = filesystem.FileSystem.create_stream

    @contextmanager
    def create_stream(self, path, mode):
        with real(self, path, mode) as file:
            yield DelayedFile(file, pauses) if str(path).endswith(".distcp") else file

    def opened(path, mode="r"):
        return DelayedFile(open(path, mode), pauses) if mode == "wb" else open(path, mode)

    filesystem.FileSystem.create_stream = create_stream
    export.open = opened


def test_slow_work_is_no_stall(folder):
    """Verifying, a rank's part of a checkpoint, and the export each exceed `stall_seconds`.

    The other rank has nothing to say meanwhile.
    """
    long = 1.4 * STALL

    def slow(rank, run):
        real = sources.examine

        def examine(*arguments):
            time.sleep(long / SLOW["figures"])
            return real(*arguments)

        sources.examine = examine
        sources.cores = lambda: 1
        if rank == 0:
            delayed([long / 50] * 50)

    run = RunDir(folder / "slow")
    recipe = resolve(run_root=str(folder), name="slow", **SLOW)
    began = time.time()
    codes = wait(start(run, recipe, slow))
    assert codes == [0, 0], log(run)
    assert time.time() - began > 3 * long, "nothing was slow enough to be taken for a stall"
    assert sorted(losses(run.read_metrics())) == [1, 2]
    assert (run.model / "model_index.json").is_file()
    assert (run.checkpoints / "step_000002" / "info.json").is_file()


def test_a_writer_that_hangs_ends_the_run(folder):
    "One rank's disk stops after twenty pieces of a checkpoint."

    def hangs(rank, run):
        if rank == 1:
            delayed([0.5] * 20 + [10**6])

    run = RunDir(folder / "hangs")
    recipe = resolve(run_root=str(folder), name="hangs", **SLOW)
    codes = wait(start(run, recipe, hangs))
    assert 17 in codes, (codes, log(run))
    said = log(run)
    assert f"no progress for {STALL} s; ending the run" in said
    assert "checkpoint" in said and "first to fall silent" in said
    assert not (run.checkpoints / "step_000002").exists()
