"""Preference data under the engines: the same numbers on one process and on two, and resumed.

In fresh forked processes, tiny models, fp32; pairs from a list with bad rows.
"""

import json
import shutil

import pytest
from forked import ENGINES, deviation, losses, train
from pairwise import engines_and_ranks
from PIL import Image

from sciftune.core.recipe import RecipeError
from sciftune.core.rundir import RunDir

BASE = dict(
    model="qwenimage",
    objective="preference",
    resolution=64,
    fit="bucket",
    held_out=2,
    global_batch=4,
    micro_batch=2,
    max_bad_fraction=0.3,
    dpo_beta=20,
    learning_rate=1e-3,
    validation_steps=4,
    validation_images=1,
    validation_sample_steps=2,
    checkpoint_steps=2,
    checkpoints_kept=9,
    steps=4,
    warmup_steps=0,
    lr_schedule="constant",
    export=False,
)
NUMBERS = ("loss", "dpo_margin", "dpo_won", "held_out", "held_out_won")


def write_pairs(folder):
    "Twelve pairs of two shapes, whose lighter image is chosen, and three rows that are none."
    folder.mkdir()
    lines = []
    for i in range(12):
        for name, shade in (("dark", 20 + i), ("light", 200 + i)):
            size = (96, 64) if i % 2 else (64, 64)
            Image.new("RGB", size, (shade, 8 * i, shade)).save(folder / f"{name}{i}.png")
        light, dark = f"light{i}.png", f"dark{i}.png"
        lines.append(dict(chosen=light, rejected=dark, caption=f"picture {i}"))
    numbered = dict(jpg_0="dark0.png", jpg_1="light0.png", caption="a tie")
    lines.append(numbered | dict(label_0=0.5, label_1=0.5))
    lines.append(dict(chosen="light0.png", rejected="nowhere.png", caption="one is missing"))
    lines.append(dict(chosen="light0.png", caption="alone"))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "pairs.jsonl"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("preference")


@pytest.fixture(scope="module")
def pairs(root):
    return str(write_pairs(root / "pairs"))


@pytest.fixture(scope="module")
def single(root, pairs):
    return {
        rank: train(RunDir(root / f"single-{rank}"), data=pairs, lora_rank=rank, **BASE)
        for rank in (0, 4)
    }


@pytest.mark.parametrize("engine,rank", engines_and_ranks(("zero3", 0), ("fsdp", 4)))
def test_two_processes_equal_one(root, pairs, single, engine, rank):
    run = RunDir(root / f"{engine}-{rank}")
    made = train(run, num_processes=2, data=pairs, lora_rank=rank, **BASE, **ENGINES[engine])
    assert set(losses(made)) == {1, 2, 3, 4}
    assert deviation(made, single[rank]) <= 1e-6
    assert deviation(made, single[rank], "held_out") <= 1e-6
    assert deviation(made, single[rank], "grad_norm") <= 1e-5


def test_pairs_are_learnt_and_bad_rows_named(root, single):
    for rank, rows in single.items():
        held = losses(rows, "held_out")
        assert held[0] == pytest.approx(0.6931, abs=1e-3) and held[4] < held[0], rank
        named = (root / f"single-{rank}" / "quarantine.jsonl").read_text().splitlines()
        told = [(json.loads(line)["source"], json.loads(line)["reason"]) for line in named]
        assert [source for source, _ in told] == [f"pairs.jsonl:{n}" for n in (13, 14, 15)]
        assert "tie" in told[0][1] and "rejected image: missing file" in told[1][1]
        assert "no pair among" in told[2][1]


def test_a_resumed_run_repeats_nothing(root, pairs, single):
    run = RunDir(root / "resumed")
    shutil.copytree(root / "single-4", run.path)
    for step in ("000003", "000004"):
        shutil.rmtree(run.checkpoints / f"step_{step}", ignore_errors=True)
    (run.path / "metrics.jsonl").unlink()
    made = train(run, data=pairs, lora_rank=4, resume="latest", **BASE)
    assert min(losses(made)) == 3
    for name in NUMBERS:
        whole = losses(single[4], name)
        assert all(value == whole[step] for step, value in losses(made, name).items()), name


def test_drawn_pictures_are_no_pairs(root):
    with pytest.raises((RecipeError, RuntimeError), match="'figures' has none"):
        train(RunDir(root / "figures"), **BASE)
