"""bf16-mixed under every engine against one process, for every family of the registry.

What an engine computes may differ from one process by bf16's own noise and no more: timesteps,
guidance and whatever else a record names reach the denoiser in fp32.
"""

import contextlib
import importlib
import inspect
import os
import warnings

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from forked import PATIENCE, USED_LATER, losses, train

from sciftune.core.registry import records
from sciftune.core.rundir import RunDir
from sciftune.models.family import get_family
from sciftune.models.sampler import GuidanceInput
from sciftune.project.ranks import on_ranks, toy_engine
from sciftune.training.task import parameter_source, unprepared_denoiser

NAMES = tuple(records("models"))
TIMES = ((39.715, 613.7), (987.31, 333.3))  # none of them is a number of eight bits
BF16 = dict(precision="bf16-mixed")


def floating(value, kept, name="", inside=False):
    "(name, whether the record keeps it, type) of the floating tensors in an argument."
    inside = inside or name in kept
    if isinstance(value, torch.Tensor):
        return [(name, inside, str(value.dtype))] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [f for k, v in value.items() for f in floating(v, kept, k, inside)]
    if isinstance(value, list | tuple):
        return [f for v in value for f in floating(v, kept, name, inside)]
    return []


def conditioning(family, folder):
    "Two random captions, and a guidance where the denoiser is told one."
    draw, rows = torch.Generator().manual_seed(1), []
    for _ in range(2):
        row = {}
        for key, (length, *width) in family.caption_shapes(family.config(folder), None).items():
            if key in ("ids", "frame"):
                row[key] = torch.randint(50, (min(length, 9),), generator=draw)
            else:
                row[key] = torch.randn(length, *width, generator=draw)
        rows.append(row)
    made = family.collate(rows)
    if isinstance(family, GuidanceInput):
        made["guidance"] = torch.tensor([3.57, 2.03])
    return made


def prediction(name, folder, fields):
    "What a family's denoiser says under an engine, and the types of what it was given."
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for key in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # of the engine before
        os.environ.pop(key, None)
    family = get_family(name)
    batch = dict(micro_batch=1, global_batch=2) if name == "bagel" else dict(global_batch=4)
    engine = toy_engine(model=name, **batch, **fields)
    model = unprepared_denoiser(engine.recipe, family, folder, engine)
    network = engine.network(
        model, fill=parameter_source(engine.recipe, family, folder, engine, model)
    )
    kept, types = family.record.float32_arguments, []
    names = list(inspect.signature(network.raw.forward).parameters)

    def look(_, args, kwargs):
        named = dict(zip(names, args, strict=False)) | kwargs
        types.extend(floating(named, kept))

    network.raw.register_forward_pre_hook(look, with_kwargs=True)
    side, draw = 4 * family.size_multiple, torch.Generator().manual_seed(2)
    x = torch.randn(2, *family.latent_shape(side, side), generator=draw)
    given = conditioning(family, folder)
    with torch.no_grad():
        made = [family.predict_at(network.module, x, torch.tensor(t), given) for t in TIMES]
    network.after_eval()
    return torch.stack(made).float(), sorted(set(types))


def predictions(folders, fields):
    "Of all families, in one process after another engine."
    return {name: prediction(name, folder, fields) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    warnings.filterwarnings("ignore")
    return {name: str(get_family(name).tiny(root / name)) for name in NAMES}


@pytest.fixture(scope="module")
def alone(folders):
    torch.set_num_threads(1)
    exact = on_ranks(predictions, 1, folders, dict(precision="fp32"))[0]
    single = on_ranks(predictions, 1, folders, BF16)[0]
    noise = {n: (single[n][0] - made).norm() for n, (made, _) in exact.items()}
    return exact, noise


@pytest.mark.parametrize(
    "strategy, names",
    [
        ("ddp", NAMES[::3]),
        ("fsdp", NAMES[::2]),
        ("zero3", [name for name in NAMES[1::2] if name != "sd15"]),  # a U-Net takes long
        *(pytest.param(name, NAMES, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "zero3")),
    ],
)
def test_engines_compute_as_one_process(folders, alone, strategy, names):
    """Each family under an engine that shards."""
    exact, noise = alone
    folders = {name: folders[name] for name in names}
    for module in USED_LATER if strategy.startswith("zero") else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    fields = dict(strategy=strategy, num_processes=2, **BF16)
    found = on_ranks(predictions, 2, folders, fields, seconds=PATIENCE)[0]
    low = "torch.float32" if strategy == "ddp" else "torch.bfloat16"
    for name, (made, types) in found.items():
        error = (made - exact[name][0]).norm()
        assert error <= 2 * noise[name], (name, error / noise[name])
        wrong = [t for t in types if t[2] != ("torch.float32" if t[1] else low)]
        assert not wrong, (name, wrong)
        told = {argument for argument, kept, _ in types if kept}
        assert told, f"{name}: no argument that its record keeps in fp32"


def test_bagel_trains_as_one_process(tmp_path):
    "Latents, noise and targets of a packed batch, through recomputed blocks."
    usual = dict(
        model="bagel",
        figures=16,
        expected_tokens=320,
        max_tokens=400,
        max_sample_tokens=400,
        vit_resolution=112,
        held_out=4,
        steps=2,
        micro_batch=1,
        global_batch=2,
        validation_steps=0,
        export=False,
        gradient_checkpointing="full",
    )
    exact = train(RunDir(tmp_path / "exact"), **usual)
    made = {"single": train(RunDir(tmp_path / "single"), **usual, **BF16)}
    for strategy in ("fsdp", "zero2") if os.environ.get("SCIFTUNE_SLOW") else ("fsdp",):
        fields = usual | BF16 | dict(strategy=strategy, num_processes=2)
        made[strategy] = train(RunDir(tmp_path / strategy), **fields)
    for key in ("mse", "ce"):
        wanted = losses(exact, key)
        errors = {
            name: max(abs(value - wanted[step]) for step, value in losses(rows, key).items())
            for name, rows in made.items()
        }
        assert max(errors.values()) <= 3 * errors["single"] + 1e-3 * wanted[1], (key, errors)
