"""LoRA on the tiny FLUX.1 in fresh forked processes.

One adapter whatever the engine, which a diffusers pipeline draws with as training did.
"""

import json
import os
import subprocess
from pathlib import Path

import diffusers
import pytest
import torch
from forked import ENGINES, deviation, log, losses, recipe_of, start, train, wait
from one_file import in_one_file
from pairwise import usual
from safetensors.torch import load_file, save_file

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir

BASE = dict(
    model="flux1",
    figures=32,
    held_out=8,
    micro_batch=2,
    global_batch=8,
    steps=8,
    learning_rate=9e-3,
    validation_steps=0,
    checkpoint_steps=0,
    lr_schedule="constant",
    lora_rank=4,
    lora_alpha=8,
    text_tokens=32,
)
WEIGHTS = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def single(root):
    run = RunDir(root / "single")
    return train(
        run, **dict(BASE, validation_steps=8, validation_sample_steps=4, validation_images=1)
    ), run


@pytest.mark.parametrize("engine", usual([("fsdp",)], [("zero2",), ("zero3",), ("fsdp",)]))
def test_every_engine_makes_the_same_adapter(root, single, engine):
    run = RunDir(root / engine)
    m = train(run, num_processes=2, **BASE, **ENGINES[engine])
    a, b = (load_file(r.model / WEIGHTS) for r in (run, single[1]))
    assert a.keys() == b.keys() and deviation(m, single[0]) <= 1e-5
    assert max((a[k] - b[k]).abs().max().item() for k in a) <= 1e-4 and any(
        b[k].abs().max() > 1e-2 for k in b if "lora_B" in k
    )


def pipeline(root):
    pipe = diffusers.DiffusionPipeline.from_pretrained(root / "cache" / "stand-ins" / "flux1")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, prompt="a bar chart"):
    return pipe(
        prompt,
        num_inference_steps=4,
        height=64,
        width=64,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=32,
        output_type="pt",
    ).images


def test_the_pipeline_draws_what_training_did(root, single):
    "Same velocities to the bit: the trained network, and the pipeline with the adapter."
    from sciftune.core.checkpoint_folders import find_checkpoint
    from sciftune.models.family import get_family
    from sciftune.strategies.adapters.kinds import is_adapter
    from sciftune.strategies.adapters.layers import add_lora
    from sciftune.training.checkpoints import CheckpointTensors

    run, family = single[1], get_family("flux1")
    recipe = resolve(**BASE)
    trained = family.load_denoiser(root / "cache" / "stand-ins" / "flux1")
    add_lora(trained, family, recipe)
    values = CheckpointTensors(find_checkpoint(run, "latest"))
    for n, p in trained.named_parameters():
        if is_adapter(n):
            p.data.copy_(values[n].reshape(p.shape))
    pipe = pipeline(root)
    plain = draw(pipe)
    pipe.load_lora_weights(run.model)
    drawn = draw(pipe)
    assert (drawn - plain).abs().max() > 0.02
    args = (
        torch.randn(2, 16, 8, 8),
        torch.tensor([0.3, 0.9]),
        dict(text=torch.randn(2, 32, 32), pooled=torch.randn(2, 32)),
    )
    with torch.no_grad():
        assert torch.equal(
            family.predict(trained.eval(), *args), family.predict(pipe.transformer.eval(), *args)
        )
    pipe.transformer = trained.eval()
    assert torch.equal(draw(pipe), drawn)


def test_merged_and_adapter_agree(root, single, warm_python):
    out = root / "merged"
    script = Path(__file__).parents[2] / "scripts" / "merge_lora"
    p = subprocess.run(
        [
            script,
            root / "cache" / "stand-ins" / "flux1",
            single[1].model,
            out,
            "--dtype",
            "float32",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "SCIFTUNE_PYTHON": warm_python},
    )
    assert p.returncode == 0, p.stderr
    adapter = pipeline(root)
    adapter.load_lora_weights(single[1].model)
    merged = diffusers.DiffusionPipeline.from_pretrained(out)
    merged.set_progress_bar_config(disable=True)
    assert (draw(adapter) - draw(merged)).abs().max() <= 2 / 255


def test_going_on_from_a_lora_and_resuming(root, single):
    more = train(
        RunDir(root / "more"),
        **dict(BASE, steps=2, export=False, lora_path=str(single[1].model), num_processes=2),
        **ENGINES["fsdp"],
    )
    assert abs(losses(more)[1] - losses(single[0])[1]) > 1e-6
    half = RunDir(root / "half")
    train(half, **dict(BASE, steps=5, export=False, num_processes=2), **ENGINES["zero3"])
    m = train(
        RunDir(root / "rest"),
        **dict(BASE, export=False, resume=str(half.checkpoints / "step_000005")),
    )
    assert min(losses(m)) == 6 and deviation(m, single[0]) <= 1e-5
    wrong, fields = RunDir(root / "wrong"), BASE | dict(lora_rank=8)
    codes = wait(start(wrong, recipe_of(wrong, lora_path=str(single[1].model), **fields)))
    assert codes == [2] and "set lora_rank=4" in log(wrong)


def test_a_checkpoint_of_adapters_goes_on_and_draws(root, single):
    from sciftune.core.checkpoint_folders import find_checkpoint
    from sciftune.lab.sample import checkpoint_source, load_source

    begun = find_checkpoint(single[1], "latest")
    run = RunDir(root / "from")
    train(run, **dict(BASE, steps=2, start_from=str(begun)))
    first = checkpoint_source(begun).changed
    base, made = (checkpoint_source(find_checkpoint(run, "latest"), s) for s in ("base", "weight"))
    assert set(base.changed) == set(made.changed) == set(first)
    assert all(torch.equal(base.changed[n], first[n]) for n in first)
    assert any(not torch.equal(made.changed[n], first[n]) for n in first)
    for source in (base, made):
        load_source(source)
    assert (run.model / WEIGHTS).is_file()


def test_a_replicated_base_under_fsdp_trains_the_same(root, single):
    m = train(
        RunDir(root / "replicated"),
        **dict(BASE, steps=4, export=False, num_processes=2, strategy="fsdp", hybrid_shard=1),
    )
    assert deviation(m, single[0]) <= 1e-5


@pytest.fixture(scope="module")
def wide(root, single):
    "A base with layers that are large enough to be kept in fewer bits."
    import shutil

    folder = root / "wide"
    shutil.copytree(root / "cache" / "stand-ins" / "flux1", folder)
    conf = json.loads((folder / "transformer" / "config.json").read_text())
    torch.manual_seed(0)
    conf |= dict(
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=128,
        axes_dims_rope=[16, 56, 56],
    )
    shutil.rmtree(folder / "transformer")
    diffusers.FluxTransformer2DModel.from_config(conf).save_pretrained(folder / "transformer")
    return folder


def test_a_base_in_fewer_bits(root, wide):
    conf = dict(BASE, model_path=str(wide), steps=4, precision="bf16-mixed", learning_rate=1e-3)
    plain = train(RunDir(root / "wide-bf16"), **conf, export=False)
    for kind, fields, error in (
        ("fp8", {}, 5e-3),
        ("nf4", dict(strategy="ddp", num_processes=2), 3e-2),
    ):
        run = RunDir(root / f"wide-{kind}")
        m = train(run, **conf, **fields, lora_base=kind)
        assert 0 < deviation(m, plain) < error
        assert set(load_file(run.model / WEIGHTS)) == set(
            load_file(root / "wide-fp8" / "model" / WEIGHTS)
        )
    pipe = diffusers.DiffusionPipeline.from_pretrained(wide)
    pipe.load_lora_weights(run.model)
    narrow = RunDir(root / "narrow")
    codes = wait(start(narrow, recipe_of(narrow, lora_base="fp8", **BASE)))
    assert codes == [2] and "no linear layer with both sides at least 256" in log(narrow)


KINDS = [("dora", "fsdp"), ("lokr", "zero3")]


@pytest.mark.parametrize("kind, engine", usual(KINDS, [*KINDS, ("dora", "zero3")]))
def test_kinds_under_engines(root, kind, engine):
    """One process, two with shards of a base in one file, and a resume by the other: the same."""
    conf = dict(BASE, steps=4, lora_kind=kind, lora_ranks="to_q=2", learning_rate=1e-2)
    run = RunDir(root / kind)
    one = train(run, **dict(conf, checkpoint_steps=2))
    base, file = root / "cache" / "stand-ins" / "flux1", root / "flux1.safetensors"
    if not file.exists():
        save_file(in_one_file("flux1", base), file)
    parts = dict(model_path=str(file), text_encoder_path=str(base))
    shards = dict(num_processes=2, export=False, **ENGINES[engine])
    two = train(RunDir(root / f"{kind}-{engine}"), **conf, **parts, **shards)
    assert deviation(two, one) <= 1e-5 and losses(one)[4] != losses(one)[1]
    resume = str(run.checkpoints / "step_000002")
    rest = train(RunDir(root / f"{kind}-rest"), **conf, **shards, resume=resume)
    assert min(losses(rest)) == 3 and deviation(rest, one) <= 1e-5
    more = dict(conf, steps=1, export=False, lora_path=str(run.model))
    again = train(RunDir(root / f"{kind}-more"), **more)
    assert losses(again)[1] != losses(one)[1]


@pytest.mark.parametrize("model", ["klein", "qwenimage"])
def test_other_families(root, model):
    """Dropout on the adapters' inputs is the same on any engine.

    What the pipeline loads is what was trained.
    """
    conf = dict(BASE, model=model, steps=4, lora_dropout=0.1, learning_rate=1e-2)
    run = RunDir(root / model)
    one = train(run, **conf)
    second = RunDir(root / f"{model}-2")
    two = train(second, num_processes=2, export=False, **conf, **ENGINES["fsdp"])
    assert deviation(two, one) <= 1e-5
    from sciftune.models.family import get_family
    from sciftune.strategies.adapters.kinds import is_adapter
    from sciftune.strategies.adapters.layers import add_lora

    family, base = get_family(model), root / "cache" / "stand-ins" / model
    net = family.load_denoiser(base)
    add_lora(net, family, resolve(**conf, lora_path=str(run.model)))
    pipe = diffusers.DiffusionPipeline.from_pretrained(base)
    pipe.load_lora_weights(run.model)
    made = dict(pipe.transformer.named_parameters())
    trained = {n: p for n, p in net.named_parameters() if is_adapter(n)}
    assert (
        trained
        and all(
            torch.equal(p, made[n.replace(".default.", ".default_0.")]) for n, p in trained.items()
        )
        and any(p.abs().max() > 0 for n, p in trained.items() if "lora_B" in n)
    )


@pytest.mark.parametrize("way", ["ddp", "zero2", "zero3", "fsdp"])
def test_a_preset_for_each_command_of_system_d(root, way):
    import yaml

    from sciftune.strategies.launch_files import write_configs

    r = resolve(
        model="flux1",
        preset=f"flux1_lora_{way}",
        num_processes=2,
        cpu=True,
        name=way,
        run_root=str(root / "d"),
    )
    run = RunDir(root / "d" / way)
    run.path.mkdir(parents=True)
    assert write_configs(r, run)[:2] == ["accelerate", "launch"]
    conf = yaml.safe_load(run.accelerate.read_text())
    assert (
        (r.learning_rate, r.weight_decay, r.adam_epsilon, r.max_grad_norm, r.timestep_density)
        == (1e-4, 3e-2, 1e-10, 0.05, "uniform")
        and r.fit == "bucket"
        and r.random_hw_adapt
        and r.bucket_min == 512
    )
    if way == "fsdp":
        f = conf["fsdp_config"]
        assert (
            f["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
            and f["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
            and f["fsdp_reshard_after_forward"]
        )
        assert (
            f["fsdp_transformer_layer_cls_to_wrap"]
            == "FluxTransformerBlock,FluxSingleTransformerBlock"
        )
    elif way == "ddp":
        assert conf["distributed_type"] == "MULTI_GPU"
    else:
        assert json.loads((run.path / "deepspeed.json").read_text())["zero_optimization"][
            "stage"
        ] == int(way[-1])
