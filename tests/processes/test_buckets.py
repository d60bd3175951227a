"""Whole images in buckets through the trainer.

The same on any number of processes, and across a resume in the middle of an epoch.
"""

import io
import json
import re
import tarfile
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import ENGINES, deviation, log, losses, train
from PIL import Image

from sciftune.core.rundir import RunDir


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    "A folder and its metadata.json, in the layout and with the names of the FLUX.1 LoRA scripts."
    root = tmp_path_factory.mktemp("buckets")
    rng = np.random.default_rng(0)
    rows = []
    (root / "images").mkdir()
    for i in range(26):
        w, h = (int(v) for v in rng.integers(40, 200, 2))
        Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)).save(
            root / "images" / f"{i}.png"
        )
        rows.append(dict(file_path=f"{i}.png", text=f"figure {i}", type="image"))
    (root / "metadata.json").write_text(json.dumps(rows))
    return root


BASE = dict(
    model="flux1",
    image_sample_size=64,
    bucket_step=16,
    enable_bucket=True,
    random_hw_adapt=True,
    random_hw_draws=2,
    text_tokens=32,
    held_out=4,
    max_train_steps=4,
    micro_batch=2,
    global_batch=8,
    validation_steps=0,
    checkpointing_steps=0,
    lr_scheduler="constant",
    adam_weight_decay=3e-2,
    max_grad_norm=0.05,
    vae_mini_batch=3,
    lora_rank=4,
    export=False,
)


def go(data, name, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(
            RunDir(data / name),
            **dict(
                BASE,
                train_data_dir=str(data / "images"),
                train_data_meta=str(data / "metadata.json"),
            )
            | kw,
        )


def test_buckets_are_the_same_on_two_processes_and_across_a_resume(data):
    one = go(data, "one", checkpointing_steps=2)
    assert "sizes around 64" in log(RunDir(data / "one")) and set(losses(one)) == set(range(1, 5))
    two = go(data, "two", num_processes=2, **ENGINES["zero3"])
    assert deviation(two, one) <= 1e-5
    rest = go(
        data,
        "rest",
        resume_from_checkpoint=str(data / "one" / "checkpoints" / "step_000002"),
        num_processes=2,
        **ENGINES["zero2"],
    )
    assert min(losses(rest)) == 3 and deviation(rest, one) <= 1e-5


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    "Wide, tall and square images, each kind in two sizes."
    root = tmp_path_factory.mktemp("figures")
    (root / "images").mkdir()
    rng = np.random.default_rng(1)
    shapes = [(160, 90), (120, 60), (70, 200), (64, 100), (90, 90), (64, 72)]
    for i in range(24):
        w, h = shapes[i % 6]
        image = Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8))
        image.save(root / "images" / f"{i:02d}.png")
        (root / "images" / f"{i:02d}.txt").write_text(f"figure {i}")
    return root


WHOLE = dict(
    preset="local",
    model_path="tiny",
    resolution=96,
    text_tokens=32,
    held_out=6,
    steps=4,
    micro_batch=2,
    global_batch=8,
    validation_steps=4,
    validation_images=3,
    validation_sample_steps=2,
    checkpoint_steps=2,
    checkpoints_kept=9,
    compile=False,
    learning_rate=1e-3,
    precision="fp32",
    warmup_steps=0,
    strategy="single",
    export=False,
)


def test_the_default_of_a_real_preset_keeps_figures_whole(figures):
    "What is cut is said; held-out images and pictures keep their shapes."
    run = RunDir(figures / "runs" / "local")
    short = dict(resolution=256, steps=2, validation_steps=2, checkpoint_steps=0)
    rows = train(run, model="klein", data=str(figures / "images"), **WHOLE | short)
    assert set(losses(rows)) == {1, 2}
    assert [row["step"] for row in rows if row.get("held_out", 0) > 0] == [0, 2]
    said = next(line for line in log(run).splitlines() if "of the pixels of this" in line)
    cut = {how: float(part) for how, part in re.findall(r"fit=(\w+) .*?cuts? ([\d.]+) %", said)}
    assert "fit=bucket cuts" in said and cut["bucket"] < 10 < 30 < cut["crop"] and cut["pad"] == 0
    folder = run.validation_images / "step_000002"
    shapes = {Image.open(folder / f"{i:02d}.png").size for i in range(3)}
    assert shapes != {(256, 256)} and all(w * h <= 256 * 256 for w, h in shapes)


@pytest.mark.parametrize("model,engine", [("qwenimage", "ddp"), ("klein", "fsdp")])
def test_padded_images_with_an_engine_and_across_a_resume(figures, model, engine):
    "Micro-batches of several shapes: the losses are those of one process, and of one at a time."
    runs = figures / "runs"
    conf = WHOLE | dict(model=model, data=str(figures / "images"), fit="pad", micro_batch=4)
    one = train(RunDir(runs / f"{model}-one"), **conf)
    assert "fit=pad cuts 0 %" in log(RunDir(runs / f"{model}-one"))
    if engine == "ddp":
        two = train(RunDir(runs / f"{model}-two"), num_processes=2, **conf | ENGINES[engine])
        assert deviation(two, one) <= 1e-5
        return
    half = str(runs / f"{model}-one" / "checkpoints" / "step_000002")
    run = RunDir(runs / f"{model}-rest")
    rest = train(run, num_processes=2, resume=half, **conf | ENGINES[engine])
    assert min(losses(rest)) == 3 and deviation(rest, one) <= 1e-5


def test_packed_samples_with_an_engine_and_across_a_resume(figures):
    "Whatever sizes come next, one behind another: the losses are those of one process."
    runs = figures / "runs"
    conf = WHOLE | dict(model="qwenimage", data=str(figures / "images"), fit="pad", packing=True)
    conf |= dict(micro_batch=4, validation_images=1)
    one = train(RunDir(runs / "packed-one"), **conf)
    assert [row["step"] for row in one if row.get("held_out", 0) > 0] == [0, 4]
    half = str(runs / "packed-one" / "checkpoints" / "step_000002")
    conf |= dict(micro_batch=2)  # what is packed together is of no account
    rest = train(
        RunDir(runs / "packed-rest"), num_processes=2, resume=half, **conf | ENGINES["fsdp"]
    )
    assert min(losses(rest)) == 3 and deviation(rest, one) <= 1e-5


def test_packed_samples_train_adapters_as_padded_ones_do(figures):
    "Every step has all samples, so their order is of no account."
    conf = WHOLE | dict(model="klein", data=str(figures / "images"), fit="pad", lora_rank=4)
    conf |= dict(global_batch=18, micro_batch=6, stratified=False, bucket_min=96, bucket_max=96)
    conf |= dict(steps=3, validation_steps=0, checkpoint_steps=0)
    padded = train(RunDir(figures / "runs" / "adapters-padded"), **conf)
    packed = train(RunDir(figures / "runs" / "adapters-packed"), packing=True, **conf)
    assert set(losses(packed)) == {1, 2, 3} and deviation(packed, padded) <= 1e-5


def test_pictures_are_validated_in_the_shapes_of_their_images(data):
    m = go(
        data,
        "look",
        validation_steps=2,
        max_train_steps=2,
        validation_images=2,
        validation_sample_steps=2,
    )
    assert [r["step"] for r in m if "held_out" in r] == [0, 2]
    folder = data / "look" / "validation_images" / "step_000002"
    shapes = [Image.open(folder / f"0{i}.png").size for i in (0, 1)]
    assert all(w % 16 == h % 16 == 0 and w * h <= 64 * 64 for w, h in shapes)
    assert any(w != h for w, h in shapes)


def tar(data, path, numbers, broken=()):
    with tarfile.open(path, "w") as t:
        for i in numbers:
            image = (data / "images" / f"{i}.png").read_bytes()[: 30 if i in broken else None]
            for name, raw in ((f"{i}.png", image), (f"{i}.txt", f"figure {i}".encode())):
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                t.addfile(info, io.BytesIO(raw))


def test_training_from_tars_with_a_broken_member(data):
    tar(data, data / "shard-0.tar", range(20), broken=[3])
    run = RunDir(data / "tar")
    m = train(
        run,
        **{k: v for k, v in BASE.items() if k != "max_train_steps"},
        steps=2,
        data=str(data / "shard-*.tar"),
    )
    assert (
        set(losses(m)) == {1, 2}
        and "shard-0.tar:3" in run.quarantine.read_text()
        and "1 rows set aside" in log(run)
    )


def parquet(data, path, numbers):
    images = [(data / "images" / f"{i}.png").read_bytes() for i in numbers]
    table = pa.table(dict(image=images, text=[f"figure {i}" for i in numbers]))
    pq.write_table(table, path, row_group_size=2)


@pytest.fixture(scope="module")
def mixture(data):
    "Three parquet shards behind a URL and two tars, three to one."
    folder = data / "mix"
    (folder / "tars").mkdir(parents=True)
    for n in range(3):
        parquet(data, folder / f"{n}.parquet", range(5 * n, 5 * n + 5))
    for n in range(2):
        tar(data, folder / "tars" / f"{n}.tar", range(15 + 4 * n, 19 + 4 * n))
    return f"file://{folder}/*.parquet:3,{folder}/tars:1"


@pytest.mark.parametrize("fit", [pytest.param("crop", marks=pytest.mark.slow), "bucket"])
def test_a_mixture_of_shards_on_any_engine_and_across_a_resume(data, mixture, fit):
    "Two shards at a time: the losses of every step are those of one process."
    conf = dict(
        model="flux1",
        data=mixture,
        shuffle_window=2,
        text_tokens=32,
        held_out=4,
        steps=4,
        micro_batch=2,
        global_batch=12,
        validation_steps=0,
        checkpoint_steps=2,
        checkpoints_kept=9,
        export=False,
        fit=fit,
        **(dict(bucket_step=16) if fit == "bucket" else {}),
    )
    whole, name = conf | dict(checkpoint_steps=0), f"mix-{fit}"
    one = train(RunDir(data / name), **conf)
    three = train(RunDir(data / f"{name}-3"), num_processes=3, **whole, **ENGINES["ddp"])
    assert deviation(three, one) <= 1e-5
    half = str(data / name / "checkpoints" / "step_000002")
    run = RunDir(data / f"{name}-rest")
    rest = train(run, num_processes=2, resume=half, **whole, **ENGINES["fsdp"])
    assert min(losses(rest)) == 3 and deviation(rest, one) <= 1e-5
