"""What makes samples, cells, parts and noise levels count more or less, all in one run.

Masks, pictures that keep what the base knew, rates by part, a range of noise levels by step and
captions with weights: under each engine of two processes as in one, and exact across a resume.
"""

import json

import numpy as np
import pytest
import torch
from forked import ENGINES, deviation, losses, train
from pairwise import TWO, usual
from PIL import Image

from sciftune.core.rundir import RunDir
from sciftune.training.checkpoints import CheckpointTensors

BASE = dict(
    model="qwenimage",
    resolution=64,
    lora_rank=4,
    prior_weight=2.0,
    mask_outside=0.1,
    lr_groups="{attn: {rate: 0.5, from_step: 1, warmup_steps: 3}}",
    sigma_range="0.5-1, 4:0-0.6",
    learning_rate=1e-3,
    held_out=2,
    validation_images=0,
    steps=6,
    micro_batch=2,
    global_batch=4,
    validation_steps=3,
    checkpoint_steps=3,
    checkpoints_kept=9,
    export=False,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "Two collections of noise; the pictures of the first have masks and captions with weights."
    root, rng = tmp_path_factory.mktemp("weighed"), np.random.default_rng(0)
    for name in ("own", "known"):
        (root / name).mkdir()
        lines = []
        for i in range(8):
            pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
            line = dict(file_name=f"{i}.png", text="noise")
            if name == "own":
                mask = np.where(rng.random((64, 64)) < 0.5, 255, 0).astype(np.uint8)
                Image.fromarray(mask).save(root / name / f"m{i}.png")
                weighed = [dict(text=f"noise {i}", weight=3), "dots"]
                line = dict(file_name=f"{i}.png", captions=weighed, mask=f"m{i}.png")
            lines.append(json.dumps(line))
        (root / name / "metadata.jsonl").write_text("\n".join(lines))
    return root


def go(root, name, **fields):
    known = str(root / "known")
    data = dict(data=f"{root}/own:3,{known}:1", prior_data=known)
    return train(RunDir(root / "runs" / name), **BASE, **data, **fields)


def adapters(root, name):
    folder = root / "runs" / name / "checkpoints" / "step_000006"
    tensors = CheckpointTensors(folder, "denoiser", "weight")
    return {key: tensors[key].flatten() for key in tensors}


@pytest.fixture(scope="module")
def one(root):
    return go(root, "one"), adapters(root, "one")


@pytest.mark.parametrize("engine", usual([("fsdp",), ("zero2",)], [(name,) for name in TWO]))
def test_two_processes_and_a_resume(root, one, engine):
    want, tensors = one
    assert any(row.get("prior_drift", 0) > 0 for row in want)
    drift = list(losses(want, "validation_drift").values())  # at steps 0, 3 and 6
    assert len(drift) == 3 and drift[0] == 0 < drift[1] < drift[2]
    two = dict(num_processes=2, **ENGINES[engine])
    rows = go(root, engine, **two)
    assert set(losses(rows)) == set(range(1, 7)) and deviation(rows, want) <= 1e-6
    again = list(losses(rows, "validation_drift").values())
    assert again == pytest.approx(drift, rel=1e-3, abs=0)
    made = adapters(root, engine)
    assert made.keys() == tensors.keys()
    for key, value in tensors.items():
        torch.testing.assert_close(made[key], value, atol=1e-6, rtol=0, msg=key)
    middle = str(root / "runs" / engine / "checkpoints" / "step_000003")
    rest = losses(go(root, f"{engine}-rest", resume=middle, **two))
    assert rest == {step: loss for step, loss in losses(rows).items() if step > 3}
    again = adapters(root, f"{engine}-rest")
    assert all(torch.equal(again[key], value) for key, value in made.items())
