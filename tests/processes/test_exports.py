"""What every preset exports, at tiny size.

It loads in diffusers and is the network that was trained. All presets: pytest -m slow.
"""

import diffusers
import pytest
import torch
from exported import check_types, load_exported, predicted, trained_network
from forked import train

from sciftune.core.checkpoint_folders import find_checkpoint
from sciftune.core.presets import preset_files, presets
from sciftune.core.recipe import resolve
from sciftune.core.registry import find_record, records
from sciftune.core.rundir import RunDir
from sciftune.lab.convert import convert_command
from sciftune.training.checkpoints import CheckpointTensors
from sciftune.training.task import Export

CLOSE = 1e-4  # largest difference between what the trained network and the exported one predict
SMALL = dict(
    model_path="tiny",
    steps=2,
    warmup_steps=0,
    lr_schedule="constant",
    learning_rate=1e-3,
    micro_batch=1,
    global_batch=2,
    num_processes=1,
    figures=16,
    validation_steps=0,
    trackers="",
    compile=False,
    cpu=True,
)
ADAPTERS = dict(lora_rank=4, lora_alpha=2)
UNET_ADAPTERS = ADAPTERS | dict(lora_targets="to_q,to_out.0,ff.net.2,conv1,time_emb_proj")


def smaller(preset, model, more):
    """The fields of a preset that have no place in a run of seconds, made small."""
    values = presets(model)[preset] | more
    fields = dict(SMALL)
    if values["objective"] in ("flow", "epsilon", "unified"):
        fields |= dict(held_out=0, text_tokens=16)
    if values["objective"] in ("flow_grpo", "diffusion_dpo"):
        fields |= dict(held_out=0, group_size=2, rollout_steps=3)
    if values.get("trained_sampling_steps"):
        fields |= dict(trained_sampling_steps=2)
    if values["objective"] == "unified":
        fields |= dict(expected_tokens=320, max_tokens=400, max_sample_tokens=400)
        fields |= dict(vit_resolution=112)
    heads = dict(sd15=256, sdxl=128)  # where a discriminator has 4x4 features to look at
    fields["resolution"] = heads[model] if values.get("gan") else 64
    if values["objective"].startswith("dmd"):
        fields |= dict(generator_every=1, warmup_steps=0)
    if values.get("model_path") == "nano":  # its layers are named in the preset
        fields |= dict(model_path="nano")
    if values.get("fit", "crop") != "crop" and values.get("bucket_min"):
        fields |= dict(bucket_min=32)
    if values.get("reference_images") and not values.get("data"):
        fields |= dict(data="edits", reference_side=64)
    if values.get("hybrid_shard"):
        fields |= dict(hybrid_shard=0)
    return fields | more


def every_case():
    """(model, preset, fields) of all presets, and of some with adapters that have none."""
    found = [(model, name, {}) for model in records("models") for name in presets(model)]
    found += [("bagel", "bagel_fsdp", ADAPTERS)]
    for model, name in (
        ("sd15", "sd_dmd2_decoupled"),
        ("sd15", "local"),
        ("sdxl", "sdxl_dmd2_4step"),
    ):
        found.append((model, name, UNET_ADAPTERS))
    return found


def quick():
    """One of each module of objectives that no family has by default, and one that edits.

    test_families.py exports the others.
    """
    usual = {record.objectives[0] for record in records("models").values()}
    first = {}
    for case in every_case():
        objective = presets(case[0])[case[1]]["objective"]
        if objective not in usual:
            first.setdefault(find_record("objectives", objective).module, case)
    return [*first.values(), ("kontext", "edit", {})]


def cases() -> list:
    """All of them, the others marked slow."""
    found, few = [], quick()
    for case in every_case():
        model, preset, more = case
        marks = () if case in few else pytest.mark.slow
        found.append(pytest.param(*case, marks=marks, id=f"{model}-{preset}{'-lora' * bool(more)}"))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("exports")


def check_student(export, folder):
    """A distilled generator is drawn in its own steps."""
    recipe = export.recipe
    scheduler = diffusers.LCMScheduler.from_pretrained(folder / "scheduler")
    scheduler.set_timesteps(recipe.denoising_steps)
    steps = scheduler.timesteps.tolist()
    first = recipe.conditioning_timestep if recipe.denoising_steps == 1 else 999
    assert len(steps) == recipe.denoising_steps and steps[0] == first


def check_autoencoder(export, run):
    """Weights of the exported VAE, and its decoder."""
    values = CheckpointTensors(export.checkpoint, "autoencoder", export.state)
    for folder, dtype in ((run.model, torch.bfloat16), (run.path / "whole", torch.float32)):
        vae = export.family.load_vae(folder)
        parameters = dict(vae.named_parameters())
        for name in values:
            found = parameters[name.removeprefix("vae.")]
            assert torch.equal(found.flatten(), values[name].to(dtype).float())


@pytest.mark.parametrize("model,preset,more", cases())
def test_a_preset_exports_what_it_trained(root, model, preset, more):
    run = RunDir(root / f"{model}-{preset}-{len(more)}")
    fields = smaller(preset, model, more)
    train(run, model=model, preset=preset, **fields)
    recipe = resolve(model=model, preset=preset, run_root=str(root), **fields)
    checkpoint = find_checkpoint(run, "latest")
    name = "generator" if recipe.objective.startswith("dmd") else "denoiser"
    for state in ("ema", "weight") if recipe.ema_decay else ("weight",):
        export = Export(checkpoint, run.model, recipe, state)
        whole = run.path / "whole"
        average = ["--ema"] if state == "ema" else []
        convert_command([str(checkpoint), str(whole), "--dtype", "fp32", "--pipeline", *average])
        if recipe.objective == "autoencoder":
            check_autoencoder(export, run)
            return
        trained = trained_network(export, name)
        want = predicted(export.family, export.base(), trained)
        made = predicted(export.family, export.base(), load_exported(export, whole))
        assert (made - want).abs().max() <= CLOSE
        if state == "ema" or not recipe.ema_decay:
            check_types(export, trained, run.model)
        if name == "generator":
            check_student(export, run.model)
            check_student(export, whole)
        whole.rename(run.path / f"whole-{state}")


def test_all_presets_have_a_case():
    assert {preset for _, preset, _ in every_case()} == set(preset_files())
