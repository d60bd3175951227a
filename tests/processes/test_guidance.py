"""Guidance as the pipelines of diffusers have it, for every family of the registry."""

import inspect
import warnings

import diffusers
import pytest
import torch
from PIL import Image

from sciftune.core.recipe import resolve
from sciftune.core.registry import find_record, records
from sciftune.models.family import get_family
from sciftune.training.validation import pipeline_sampler

PIPELINES = {
    name: getattr(diffusers, record.pipeline_class)
    for name, record in records("models").items()
    if hasattr(diffusers, record.pipeline_class)
}
SCALES = (0.0, 0.7, 1.0, 1.3, 4.0)


def scale_name(pipeline):
    "How the call names the scale, and its usual value."
    known = inspect.signature(pipeline.__call__).parameters
    own = known.get("guidance_scale")
    name = "guidance_scale" if own and own.default is not None else "true_cfg_scale"
    return name, known[name].default, known["num_inference_steps"].default


def rows_of(pipe, **call):
    "Rows that the denoiser is given in a pipeline's call."
    rows = []

    def count(_, args, kwargs):
        rows.append(len(next(v for v in (*args, *kwargs.values()) if v is not None)))

    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    hook = denoiser.register_forward_pre_hook(count, with_kwargs=True)
    pipe(**call)
    hook.remove()
    return sum(rows)


def variants():
    "Families, and those whose weights may be distilled in both forms."
    for name in PIPELINES:
        yield name, {}
        if "distilled" in get_family(name).tiny_variants:
            yield name, dict(distilled=True)


@pytest.mark.parametrize("name,variant", list(variants()))
def test_a_second_prediction_where_the_pipeline_makes_one(tmp_path, name, variant):
    warnings.filterwarnings("ignore")
    family = get_family(name)
    folder = family.tiny(tmp_path / "tiny", **variant)
    pipe = family.build_tiny(**variant)
    pipe.set_progress_bar_config(disable=True)
    if hasattr(pipe, "vae"):  # the image of every call is the same, and often made a megapixel
        real, made = pipe.vae.encode, {}
        pipe.vae.encode = lambda x: made.get(x.shape) or made.setdefault(x.shape, real(x))
    scale, _, _ = scale_name(PIPELINES[name])
    known = inspect.signature(PIPELINES[name].__call__).parameters
    call = dict(prompt="a ship", num_inference_steps=1, output_type="latent")
    call |= dict(height=64, width=64)
    if "max_area" in known:
        call["max_area"] = 64 * 64
    if scale == "true_cfg_scale":
        call["negative_prompt"] = " "
    if family.record.references and known.get("image") is not None:
        call["image"] = Image.new("RGB", (64, 64))
    once = None
    for value in SCALES:
        with torch.no_grad():
            rows = rows_of(pipe, **call, **{scale: value})
        once = once or rows
        assert rows == once * (1 + family.guides(value, folder)), (value, rows)


@pytest.mark.parametrize("name", PIPELINES)
def test_usual_values_are_those_of_the_call(name):
    family = get_family(name)
    _, guidance, steps = scale_name(PIPELINES[name])
    assert (family.default_guidance, family.default_sample_steps) == (guidance, steps)


@pytest.mark.parametrize("name", PIPELINES)
def test_validation_and_rollouts_ask_the_record(tmp_path, monkeypatch, name):
    family, asked = get_family(name), []
    folder = family.tiny(tmp_path / "tiny")
    monkeypatch.setattr(family, "sample", lambda *rest: asked.append(rest[4] is not None))
    for value in SCALES:
        recipe = resolve(model=name, validation_guidance=value, validation_sample_steps=2)
        draw = pipeline_sampler(recipe, family, None, folder, lambda numbers: {})
        draw([0], torch.zeros(1, *family.latent_shape(64, 64)), {})
        assert asked.pop() == family.record.guides(value)
        if name in find_record("objectives", "flow_grpo").models:
            from sciftune.planner.work import step_cost_of

            rollouts = resolve(model=name, objective="flow_grpo", rollout_guidance=value)
            assert step_cost_of(rollouts).guided == 1 + family.record.guides(value)
