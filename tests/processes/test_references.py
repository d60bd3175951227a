"""Reference images through the trainer: an edit set in a list, on any engine, across a resume."""

import json
import warnings

import numpy as np
import pytest
from forked import ENGINES, deviation, losses, recipe_of, train
from pairwise import TWO, usual
from PIL import Image, ImageOps

from sciftune.core.fields import RecipeError
from sciftune.core.rundir import RunDir
from sciftune.models.family import get_family
from sciftune.planner.plan import plan
from sciftune.planner.profile import profile

SHAPES = [(96, 64), (64, 112), (80, 80), (130, 70), (70, 90)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    "26 edits with one to three references of unequal sizes; the references of two are broken."
    root = tmp_path_factory.mktemp("edits")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(26):
        names = []
        for k in range(1 + i % 3):
            width, height = SHAPES[(i + k) % len(SHAPES)]
            picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            names.append(f"{i}-{k}.png")
            picture.save(root / names[-1])
        ImageOps.invert(Image.open(root / names[0])).save(root / f"{i}.png")
        lines.append(dict(edited_image=f"{i}.png", source_image=names, edit_prompt=f"invert {i}"))
    (root / "3-0.png").write_bytes((root / "3-0.png").read_bytes()[:99])
    Image.new("RGB", (20, 20)).save(root / "8-2.png")
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


BASE = dict(
    model="klein",
    max_bad_fraction=0.1,
    resolution=64,
    fit="bucket",
    bucket_step=16,
    reference_images=3,
    reference_side=64,
    reference_dropout=0.2,
    held_out=4,
    steps=4,
    micro_batch=2,
    global_batch=8,
    validation_steps=4,
    validation_images=2,
    validation_sample_steps=2,
    checkpoint_steps=2,
    checkpoints_kept=9,
    export=False,
)
LORA = dict(lora_rank=4)
SHORT = dict(steps=3, validation_steps=3, checkpoint_steps=0, export=True)
TOLD = dict(model="flux2_dev", text_tokens=16)
JOINT = dict(model="qwenimage21", caption_dropout=0.3, text_tokens=64, bucket_step=32)
SEEING = dict(model="qwenimage_edit", caption_dropout=0.3, text_tokens=64)


def go(root, name, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(RunDir(root / "runs" / name), **BASE | dict(data=str(root)) | kw)


@pytest.fixture(scope="module")
def one(data):
    return go(data, "one", export=True)


def held_out(rows):
    return {row["step"]: row["held_out"] for row in rows if row.get("held_out", 0) > 0}


def pictures(data, name):
    folder = data / "runs" / name / "validation_images" / "step_000004"
    return [np.asarray(Image.open(folder / f"{i:02d}.png"), int) for i in range(2)]


def test_a_row_with_a_bad_reference_is_set_aside(data, one):
    lines = (data / "runs" / "one" / "quarantine.jsonl").read_text().splitlines()
    reasons = {r["source"]: r["reason"] for r in map(json.loads, lines)}
    assert reasons.keys() == {"metadata.jsonl:4", "metadata.jsonl:9"}
    assert reasons["metadata.jsonl:4"].startswith("reference image 1: unreadable image")
    assert reasons["metadata.jsonl:9"].startswith("reference image 3: 20x20 is too small")
    assert set(losses(one)) == set(range(1, 5)) and held_out(one).keys() == {0, 4}
    shown = sorted(p.name for p in (data / "runs/one/validation_images/references").iterdir())
    assert {"00-0.png", "01-0.png"} <= set(shown)


def assert_same(data, rows, one, names):
    "Losses, gradient norms, held-out losses and pictures of two runs."
    assert deviation(rows, one) <= 1e-6 and deviation(rows, one, "grad_norm") <= 1e-5
    assert held_out(rows).keys() == held_out(one).keys()
    for step, value in held_out(one).items():
        assert abs(held_out(rows)[step] / value - 1) < 1e-6
    for a, b in zip(*(pictures(data, name) for name in names), strict=True):
        assert a.shape == b.shape and abs(a - b).max() <= 2


@pytest.mark.parametrize("engine", usual([("zero2",)], [(name,) for name in (*TWO, "zero1")]))
def test_two_processes_train_and_validate_with_references(data, one, engine):
    "Losses, held-out loss and pictures are those of one process."
    rows = go(data, engine, num_processes=2, **ENGINES[engine])
    assert_same(data, rows, one, (engine, "one"))


@pytest.fixture(scope="module")
def lora(data):
    return go(data, "lora", **LORA)


@pytest.mark.parametrize("engine", usual([("fsdp",)], [("fsdp",), ("zero2",)]))
def test_adapters_train_with_references(data, one, lora, engine):
    "On two processes as on one; and they are not the full run."
    rows = go(data, f"lora-{engine}", num_processes=2, **LORA | ENGINES[engine])
    assert_same(data, rows, lora, (f"lora-{engine}", "lora"))
    assert lora[-1]["step"] == 4 and deviation(lora, one) > 1e-6


@pytest.mark.parametrize("engine,n", usual([("single", 1)], [("single", 1), ("zero3", 2)]))
def test_a_resume_is_bit_for_bit(data, one, engine, n):
    whole = one if n == 1 else go(data, "whole", num_processes=n, **ENGINES[engine])
    name = "one" if n == 1 else "whole"
    path = str(data / "runs" / name / "checkpoints" / "step_000002")
    rest = go(data, f"rest-{engine}", resume=path, num_processes=n, **ENGINES[engine])
    rest, whole = losses(rest), losses(whole)
    assert rest.keys() == {3, 4} and all(rest[step] == whole[step] for step in rest)


def test_references_change_the_training(data, one):
    "A run that loses all its references is another one; what is held out keeps them."
    lost = go(data, "lost", reference_dropout=1.0)
    assert deviation(lost, one) > 1e-4  # a tiny random model hardly looks at them
    before = held_out(one)[0]
    assert abs(held_out(lost)[0] / before - 1) < 1e-6


def test_the_export_is_a_pipeline_that_takes_images(data, one):
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(data / "runs" / "one" / "model")
    assert type(pipe) is diffusers.Flux2KleinPipeline
    pipe.set_progress_bar_config(disable=True)
    source = [Image.open(data / "0-0.png"), Image.open(data / "1-0.png")]
    made = pipe(image=source, prompt="invert 0", num_inference_steps=2, height=64, width=48)
    assert made.images[0].size == (48, 64)


@pytest.fixture(scope="module")
def told(data):
    "A model that is told a guidance, and whose text encoder is a part of a larger one."
    return go(data, "told", **SHORT, **TOLD)


def dev_pipeline(folder):
    "Without torchvision, which the processor of its folder needs."
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, tokenizer=None)
    pipe.tokenizer = get_family("flux2_dev").load_processor(folder / "tokenizer")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_what_it_exports_samples_with_images(data, told):
    pipe = dev_pipeline(data / "runs" / "told" / "model")
    base = get_family("flux2_dev").tiny(data / "runs" / "dev-base")
    assert type(pipe).__name__ == "Flux2Pipeline" and pipe.transformer.config.guidance_embeds
    before, after = get_family("flux2_dev").load_denoiser(base), pipe.transformer.state_dict()
    embedder = [n for n in after if "guidance_embedder" in n]
    assert embedder and all(
        (after[n] - before.state_dict()[n].bfloat16().float()).any() for n in embedder
    )
    source = [Image.open(data / "0-0.png"), Image.open(data / "1-0.png")]
    made = pipe(image=source, prompt="invert 0", num_inference_steps=2, height=64, width=48)
    assert made.images[0].size == (48, 64) and np.asarray(made.images[0]).std() > 0


@pytest.fixture(scope="module")
def seeing(data):
    "A model whose captions see the references; they, and its negative captions, are cached so."
    return go(data, "seeing", **SHORT, **SEEING)


def edit_pipeline(folder):
    "With a processor that needs no torchvision, as that of the folder does."
    import diffusers

    processor = get_family("qwenimage_edit").load_processor(folder / "processor")
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, processor=processor)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_export_samples_with_images_in_its_captions(data, seeing, monkeypatch):
    import diffusers
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 96 * 96)
    pipe = edit_pipeline(data / "runs" / "seeing" / "model")
    assert type(pipe) is diffusers.QwenImageEditPlusPipeline and pipe.transformer.zero_cond_t
    source = [Image.open(data / "0-0.png"), Image.open(data / "1-0.png")]
    made = pipe(image=source, prompt="invert 0", num_inference_steps=2, height=64, width=48)
    assert made.images[0].size == (48, 64) and np.asarray(made.images[0]).std() > 0


def test_drawing_an_edit_shows_its_images_to_the_text_encoder(data, seeing, monkeypatch):
    "In batches of unequal references, and as the pipeline draws it."
    import torch
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

    from sciftune.core.randomness import stream
    from sciftune.lab.sample import Request, draw_samples, find_weights
    from sciftune.models.tokens import pack

    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 64 * 64)
    family, source = get_family("qwenimage_edit"), find_weights(data / "runs" / "seeing" / "model")
    a, b = str(data / "0-0.png"), str(data / "1-0.png")
    size = dict(steps=2, guidance=4.0, height=48, width=80)
    edits = [Request("invert", references=given, **size) for given in ((a,), (b,), (a, b))]
    drawn = draw_samples(source, edits, device="cpu")
    pipe = edit_pipeline(source.base)
    noise = torch.randn(family.latent_shape(48, 80), generator=stream(0, "picture", 0))[None]
    for i, edit in enumerate(edits):
        wanted = pipe(
            image=[Image.open(file) for file in edit.references],
            prompt="invert",
            negative_prompt=" ",
            true_cfg_scale=4.0,
            num_inference_steps=2,
            height=48,
            width=80,
            latents=pack(noise),
        ).images[0]
        assert abs(np.asarray(wanted, int) - np.asarray(drawn[i], int)).max() <= 1


@pytest.fixture(scope="module")
def joint(data):
    "A model that reads caption, references and picture as one sequence."
    return go(data, "joint", **SHORT, **JOINT)


def joint_pipeline(folder):
    "With a processor that needs no torchvision, as that of the folder does."
    import diffusers

    processor = get_family("qwenimage21").load_processor(folder / "processor")
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, processor=processor)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_export_samples_a_joint_sequence(data, joint):
    pipe = joint_pipeline(data / "runs" / "joint" / "model")
    assert type(pipe).__name__ == "QwenImage21Pipeline"
    size = dict(height=64, width=32, output_resolution=64)
    source = [Image.open(data / "0-0.png"), Image.open(data / "1-0.png")]
    made = pipe(image=source, prompt="invert 0", num_inference_steps=2, **size).images[0]
    assert made.size == (32, 64) and np.asarray(made).std() > 0


def test_drawing_a_joint_sequence_is_what_the_pipeline_draws(data, joint):
    "In batches of unequal references."
    import torch

    from sciftune.core.randomness import stream
    from sciftune.lab.sample import Request, draw_samples, find_weights

    family, source = get_family("qwenimage21"), find_weights(data / "runs" / "joint" / "model")
    a, b = str(data / "0-0.png"), str(data / "1-0.png")
    size = dict(steps=2, guidance=4.0, height=64, width=96)
    edits = [Request("invert", references=given, **size) for given in ((a,), (a, b), ())]
    drawn = draw_samples(source, edits, device="cpu")
    pipe = joint_pipeline(source.base)
    noise = torch.randn(family.latent_shape(64, 96), generator=stream(0, "picture", 0))[None]
    for i, edit in enumerate(edits):
        wanted = pipe(
            image=[Image.open(file) for file in edit.references] or None,
            prompt="invert",
            negative_prompt=" ",
            true_cfg_scale=4.0,
            num_inference_steps=2,
            height=64,
            width=96,
            output_resolution=source.reference_side or 1024,
            latents=noise.flatten(2).transpose(1, 2),
        ).images[0]
        on_white = Image.new("RGB", wanted.size, "white")
        on_white.paste(wanted, mask=wanted.getchannel("A"))
        assert abs(np.asarray(on_white, int) - np.asarray(drawn[i], int)).max() <= 2


def test_what_does_not_fit_is_refused_by_name(data):
    run = RunDir(data / "runs" / "refused")
    with pytest.raises(RecipeError, match="reference_images: 3 with model 'zimage', which takes n"):
        recipe_of(run, **BASE | dict(model="zimage", data=str(data)))
    with pytest.raises(RecipeError, match="2 with model 'kontext', which takes at most 1"):
        recipe_of(run, **BASE | dict(model="kontext", data=str(data), reference_images=2))
    with pytest.raises(RecipeError, match="reference_dropout: needs reference_images"):
        recipe_of(run, model="klein", reference_dropout=0.5)
    with pytest.raises(RecipeError, match="reference_side: must be 64 or more"):
        recipe_of(run, model="klein", reference_images=1, reference_side=32)
    for asked, cure in (
        (dict(reference_images=0, reference_side=0, reference_dropout=0), "set reference_images=3"),
        (dict(reference_images=2), "set reference_images=3"),
    ):
        with pytest.raises(RuntimeError, match=cure):
            go(data, f"refused-{asked['reference_images']}", **asked)
    plain = dict(reference_images=0, reference_side=0, reference_dropout=0, model="zimage")
    with pytest.raises(RuntimeError, match="model 'zimage' with objective 'flow' takes none"):
        go(data, "refused-zimage", **plain)
    with pytest.raises(RuntimeError, match="no row of data has a reference image"):
        go(data, "refused-figures", data="figures", figures=16, max_bad_fraction=0.05)


def test_the_plan_counts_references(data):
    "Memory and FLOPs grow by the tokens of as many and as large references as the recipe allows."
    family = get_family("klein4b")
    conf = dict(model="klein4b", model_path="random", resolution=512, preset="tiny")
    plain, one, two = (
        profile(recipe_of(RunDir(data / "plan"), **conf | more), family, vae=False)
        for more in (
            {},
            dict(reference_images=1, reference_side=512),
            dict(reference_images=2, reference_side=512),
        )
    )
    config = family.config()
    assert two.flops == family.flops_with(config, 512, 512, 512, 2 * 1024) > one.flops > plain.flops
    for kept in (lambda p: sum(b.eager(1) for b in p.blocks), lambda p: p.outside(1)):
        assert kept(two) > kept(one) > kept(plain)
    tokens = [1024 + 512, 2 * 1024 + 512, 3 * 1024 + 512]
    rate = [
        sum(b.eager(1) for b in p.blocks) / n
        for p, n in zip((plain, one, two), tokens, strict=True)
    ]
    assert max(rate) / min(rate) < 1.02


def test_the_plan_counts_what_captions_see(data):
    "Vision tokens are tokens of the caption, in FLOPs and in memory."
    family = get_family("qwenimage_edit")
    conf = dict(model="qwenimage_edit", model_path="random", resolution=512, preset="tiny")
    one, two = (
        profile(recipe_of(RunDir(data / "plan"), **conf, **more), family, vae=False)
        for more in (
            dict(reference_images=1, reference_side=512, text_tokens=309),
            dict(reference_images=2, reference_side=512, text_tokens=106),
        )
    )
    config, seen = family.config(), 14 * 14 + 7
    assert config["zero_cond_t"] and one.numel == 20_430_401_088
    for profiled, references in ((one, 1), (two, 2)):
        assert profiled.flops == family.flops_with(config, 512, 512, 512, references * 1024)
    assert 309 + seen == 106 + 2 * seen == 512
    kept = [sum(b.eager(1) for b in p.blocks) for p in (one, two)]
    assert abs(kept[1] / kept[0] - (3 * 1024 + 512) / (2 * 1024 + 512)) < 0.02


def test_the_plan_says_what_the_largest_model_needs(data):
    "Adapters on one H200, with references, too; all weights on two, and not on one."

    def planned(processes, **more):
        conf = dict(model="flux2_dev", model_path="random", preset="local", data="figures")
        conf |= dict(plan_device="H200", host_memory_gib=2000, launcher="print", cpu=False)
        conf |= dict(offload="none")
        recipe = recipe_of(RunDir(data / "plan"), **conf | dict(num_processes=processes) | more)
        return plan(recipe)

    adapters = dict(strategy="single", lora_rank=16, learning_rate=1e-4)
    alone = planned(1, **adapters)
    assert alone.parameters - alone.trained == 32_223_281_152 and alone.trained == 77_070_336
    with_two = planned(1, reference_images=2, **adapters)
    assert alone.run.fits and with_two.run.fits
    assert with_two.step_time > 3 * alone.step_time
    for strategy, processes, fits in (("single", 1, False), ("ddp", 2, False), ("fsdp", 2, True)):
        unshared = dict(shard_states=False) if strategy == "ddp" else {}
        whole = planned(processes, strategy=strategy, **unshared)
        assert whole.run.fits == fits and whole.trained == 32_223_281_152
