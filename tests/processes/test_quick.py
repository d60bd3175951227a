"""The shortest way through everything, for every commit: `scripts/test --quick` runs this file.

Each engine trains a stand-in to the same numbers, validates, saves and exports; another engine
resumes; a two-network objective and adapters take their steps.
"""

import pytest
from forked import ENGINES, deviation, losses, train
from PIL import Image
from small_unets import small_unet

from sciftune.core.rundir import RunDir
from sciftune.models.family import get_family

TINY = {
    "model": "qwenimage",
    "steps": 4,
    "held_out": 4,
    "micro_batch": 2,
    "global_batch": 4,
    "resolution": 64,
    "text_tokens": 32,
    "validation_steps": 4,
    "validation_images": 1,
    "validation_sample_steps": 2,
    "checkpoint_steps": 2,
    "ema_decay": 0.9,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for the runs of this file, so that they share caches."""
    return tmp_path_factory.mktemp("quick")


@pytest.fixture(scope="module")
def tiny(folder):
    """The fields of all runs, with sixteen pictures of one colour each."""
    images = folder / "images"
    images.mkdir()
    for i in range(16):
        Image.new("RGB", (64, 64), (16 * i, 8 * i, 255 - 16 * i)).save(images / f"{i:02d}.png")
        (images / f"{i:02d}.txt").write_text(f"colour number {i}")
    return TINY | {"data": str(images)}


@pytest.fixture(scope="module")
def single(folder, tiny):
    """Metrics of the run that the others must equal."""
    return train(RunDir(folder / "single"), **tiny, checkpoints_kept=9)


def test_validates_saves_and_exports(folder, single):
    run = RunDir(folder / "single")
    assert sorted(losses(single)) == [1, 2, 3, 4]
    assert [row["step"] for row in single if "held_out" in row][-1] == 4
    assert list(run.validation_images.glob("step_000004/*.png"))
    assert sorted(path.name for path in run.checkpoints.glob("step_*")) == [
        "step_000002",
        "step_000004",
    ]
    family = get_family("qwenimage")
    assert (
        family.load_denoiser(run.model).config
        == family.load_denoiser(folder / "cache" / "stand-ins" / "qwenimage").config
    )


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_two_processes_equal_one(folder, tiny, single, engine):
    lean = {"validation_steps": 0, "checkpoint_steps": 0, "export": False}
    run = RunDir(folder / engine)
    metrics = train(run, num_processes=2, **tiny | ENGINES[engine] | lean)
    assert deviation(metrics, single) < 1e-5
    assert deviation(metrics, single, "grad_norm") < 1e-5


def test_another_engine_resumes(folder, tiny, single):
    checkpoint = folder / "single" / "checkpoints" / "step_000002"
    fields = tiny | ENGINES["ddp"] | {"resume": str(checkpoint), "export": False}
    metrics = train(RunDir(folder / "resumed"), num_processes=2, **fields)
    assert sorted(losses(metrics)) == [3, 4]
    assert deviation(metrics, single) < 1e-5


def test_two_networks_take_turns(folder, tiny):
    fields = tiny | {"model": "sd15", "objective": "dmd2", "export": False, "validation_steps": 0}
    fields["model_path"] = small_unet("sd15", folder)
    for name in ("ema_decay", "held_out"):  # a distillation reads neither
        fields.pop(name)
    metrics = train(RunDir(folder / "dmd"), **fields)
    assert any("loss_dm" in row for row in metrics)


def test_adapters(folder, tiny):
    fields = tiny | {"model": "klein", "lora_rank": 4, "validation_steps": 0}
    run = RunDir(folder / "adapters")
    assert sorted(losses(train(run, **fields))) == [1, 2, 3, 4]
    assert (run.model / "pytorch_lora_weights.safetensors").is_file()
