"""A run on a card that is full: it recomputes more blocks, and its numbers stay the same."""

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir

TRAIN = """
import itertools, sys
from sciftune.training import retries, trainer

if sys.argv[2] == "full":  # every step has one retry
    retries.retries_so_far = lambda device, count=itertools.count(): next(count)
trainer.run_rank([sys.argv[1]])
"""


def trained(python, root, kind):
    """The rows of a run of nine steps on a CPU."""
    run = RunDir(root / kind)
    run.path.mkdir()
    small = dict(model="klein", resolution=64, text_tokens=32, figures=16, held_out=4, steps=9)
    small |= dict(micro_batch=2, global_batch=4, validation_steps=0, checkpoint_steps=0)
    resolve(
        cpu=True, run_root=str(root), export=False, gradient_checkpointing="none", **small
    ).save(run.recipe)
    done = python("-c", TRAIN, run.recipe, kind)
    assert done.returncode == 0, done.stdout + done.stderr
    return run.read_metrics(), done.stdout


def test_retries_recompute_more_blocks_and_change_no_number(python, tmp_path):
    (plain, _), (full, said) = (trained(python, tmp_path, kind) for kind in ("plain", "full"))
    numbers = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
        for rows in (plain, full)
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 9
    found = [row for row in full if row.get("name") == "allocator retries"]
    assert [row["step"] for row in found][:2] == [4, 6] and "1 blocks are recomputed" in said
    assert "numbers stay the same" in found[0]["cure"]
    assert not [row for row in plain if row.get("event") == "trouble"]
