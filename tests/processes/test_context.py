"""Ranks that share the tokens of a sample against one process: unequal pictures, tiny models, fp32.

Losses, gradient norms, sums over samples, held-out losses, pictures and checkpoints must be those
of one process. No number of tokens here is divisible by the ranks.
"""

import json

import numpy as np
import pytest
from forked import ENGINES, deviation, log, losses, recipe_of, start, train, wait
from PIL import Image

from sciftune.core.recipe import RecipeError
from sciftune.core.rundir import RunDir
from sciftune.planner.plan import plan

SHAPES = [(160, 96), (112, 48), (80, 208), (64, 112), (96, 96), (64, 80)]
BASE = dict(
    preset="local",
    model_path="tiny",
    fit="pad",
    resolution=96,
    text_tokens=31,
    held_out=5,
    steps=2,
    micro_batch=2,
    global_batch=8,
    validation_steps=2,
    validation_images=3,
    validation_sample_steps=2,
    checkpoint_steps=1,
    checkpoints_kept=9,
    loss_sigmas=2,
    compile=False,
    learning_rate=1e-3,
    max_grad_norm=0.5,
    precision="fp32",
    gradient_checkpointing="full",
    warmup_steps=0,
    strategy="single",
    export=False,
)
CONTEXT = {
    "fsdp-2": ENGINES["fsdp"] | dict(num_processes=2, context_parallel=2),
    "ddp-2": ENGINES["ddp"] | dict(num_processes=2, context_parallel=2),
    "fsdp-4": ENGINES["fsdp"] | dict(num_processes=4, context_parallel=2),
    "hybrid-4": ENGINES["fsdp-hybrid"] | dict(num_processes=4, context_parallel=2),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "Pictures of six shapes with captions of unequal length."
    folder = tmp_path_factory.mktemp("context")
    (folder / "images").mkdir()
    rng = np.random.default_rng(1)
    for i in range(17):
        width, height = SHAPES[i % 6]
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.save(folder / "images" / f"{i:02d}.png")
        (folder / "images" / f"{i:02d}.txt").write_text("figure " * (1 + i % 4) + str(i))
    return folder


@pytest.fixture(scope="module")
def alone(root):
    "A function: the run of one process, once for each model and rank of adapters."
    made = {}

    def get(model, rank=0):
        if (model, rank) not in made:
            made[model, rank] = go(root, f"{model}-{rank}", model=model, lora_rank=rank)
        return made[model, rank]

    return get


def go(root, name, **fields):
    return train(RunDir(root / "runs" / name), data=str(root / "images"), **BASE | fields)


def pictures(root, name):
    folder = root / "runs" / name / "validation_images" / "step_000002"
    return [np.asarray(Image.open(folder / f"{i:02d}.png")).astype(int) for i in range(3)]


def assert_equal(made, wanted):
    "Every number of every step that both have."
    assert deviation(made, wanted) <= 1e-6
    assert deviation(made, wanted, "grad_norm") <= 1e-5
    for key in ("latent_mean", "latent_std", "held_out"):
        assert deviation(made, wanted, key) <= 1e-5, key
    for key in ("loss_sigma_count", "loss_sigma"):
        rows, others = losses(made, key), losses(wanted, key)
        for step in rows.keys() & others.keys():
            assert rows[step] == pytest.approx(others[step], rel=1e-5), key


@pytest.mark.parametrize(
    "model,engine,rank",
    [
        ("klein", "fsdp-2", 0),
        ("qwenimage", "fsdp-4", 0),
        pytest.param("klein", "fsdp-4", 4, marks=pytest.mark.slow),
        pytest.param("qwenimage", "fsdp-2", 4, marks=pytest.mark.slow),
        pytest.param("qwenimage", "ddp-2", 0, marks=pytest.mark.slow),
        pytest.param("klein", "hybrid-4", 0, marks=pytest.mark.slow),
        pytest.param("flux1", "fsdp-2", 0, marks=pytest.mark.slow),
    ],
)
def test_sharing_tokens_changes_nothing(root, alone, model, engine, rank):
    wanted = alone(model, rank)
    made = go(root, f"{model}-{engine}-{rank}", model=model, lora_rank=rank, **CONTEXT[engine])
    assert set(losses(made)) == {1, 2}
    assert [row["step"] for row in made if "held_out" in row] == [0, 2]
    assert_equal(made, wanted)
    both = zip(
        pictures(root, f"{model}-{engine}-{rank}"), pictures(root, f"{model}-{rank}"), strict=True
    )
    assert max(np.abs(a - b).max() for a, b in both) <= 1


@pytest.mark.parametrize(
    "first,then",
    [
        ("fsdp-2", dict(strategy="single")),
        pytest.param("single", CONTEXT["fsdp-4"], marks=pytest.mark.slow),
        pytest.param("fsdp-2", CONTEXT["fsdp-4"], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks_per_sample(root, alone, first, then):
    wanted = alone("klein")
    name = "klein-0" if first == "single" else f"klein-{first}-0"
    source = root / "runs" / name
    if not source.exists():
        go(root, name, model="klein", **CONTEXT[first])
    half = str(source / "checkpoints" / "step_000001")
    went_on = f"{name}-to-{then.get('num_processes', 1)}"
    rest = go(root, went_on, model="klein", resume=half, **then)
    assert set(losses(rest)) == {2}
    assert_equal(rest, wanted)


def test_reference_images_are_divided_too(root):
    "klein shows the picture before an edit behind the one after it."
    edits = [
        dict(file_name=f"{i:02d}.png", text=f"edit {i}", source_image=f"{i % 3 + 2:02d}.png")
        for i in range(8)
    ]
    (root / "edits.jsonl").write_text("\n".join(map(json.dumps, edits)))
    fields = dict(data=str(root / "images"), metadata=str(root / "edits.jsonl"))
    fields |= dict(reference_images=1, fit="crop", resolution=64, held_out=2)
    fields |= dict(validation_steps=0, checkpoint_steps=0, text_tokens=32, loss_sigmas=0)
    conf = BASE | dict(model="klein") | fields
    one = train(RunDir(root / "runs" / "edit-1"), **conf)
    two = train(RunDir(root / "runs" / "edit-2"), **conf | CONTEXT["fsdp-2"])
    assert deviation(two, one) <= 1e-6 and deviation(two, one, "grad_norm") <= 1e-5


def test_heads_that_cannot_be_divided_are_refused(root):
    run = RunDir(root / "runs" / "heads")
    four = ENGINES["fsdp"] | dict(num_processes=4, context_parallel=4)
    fields = BASE | dict(model="klein", data=str(root / "images")) | four
    why = "context_parallel: 4 does not divide the 2 attention heads"
    with pytest.raises(RecipeError, match=why):
        plan(recipe_of(run, **fields))
    codes = wait(start(run, recipe_of(run, **fields)))
    assert 2 in codes and why in log(run)
