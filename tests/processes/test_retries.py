"""A run on a card that is full: it recomputes more blocks, and its numbers stay the same."""

import itertools

from forked import log, recipe_of, start, wait

from sciftune.core.rundir import RunDir
from sciftune.training import retries


def every_step(rank, run):
    """Let every step have one retry."""
    numbers = itertools.count()
    retries.retries_so_far = lambda device: next(numbers)


def trained(root, kind, sabotage=None):
    """The rows of a run of nine steps on a CPU, and its log."""
    run = RunDir(root / kind)
    small = dict(model="klein", resolution=64, text_tokens=32, figures=16, held_out=4, steps=9)
    small |= dict(micro_batch=2, global_batch=4, validation_steps=0, checkpoint_steps=0)
    recipe = recipe_of(run, export=False, gradient_checkpointing="none", **small)
    assert wait(start(run, recipe, sabotage)) == [0], log(run)
    return run.read_metrics(), log(run)


def test_retries_recompute_more_blocks_and_change_no_number(tmp_path):
    (plain, _), (full, said) = trained(tmp_path, "plain"), trained(tmp_path, "full", every_step)
    numbers = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
        for rows in (plain, full)
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 9
    found = [row for row in full if row.get("name") == "allocator retries"]
    assert [row["step"] for row in found][:2] == [4, 6] and "1 blocks are recomputed" in said
    assert "numbers stay the same" in found[0]["cure"]
    assert not [row for row in plain if row.get("event") == "trouble"]
