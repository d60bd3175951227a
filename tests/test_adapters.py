"""Adapters of other people: merged as diffusers and peft merge them, or refused by name."""

import copy
import json
import logging
import random

import diffusers
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from sciftune.core.recipe import RecipeError, resolve
from sciftune.models.family import get_family
from sciftune.strategies.lora import Merged, add_lora

FAMILIES = ("qwenimage", "flux1", "kontext", "klein", "zimage", "sd15", "sdxl")
RANK = 4


@pytest.fixture(scope="module", params=FAMILIES)
def stand_in(request, tmp_path_factory):
    """A family, its small pipeline, and the folder of it."""
    family = get_family(request.param)
    folder = family.tiny(tmp_path_factory.mktemp(request.param) / "base")
    diffusers.utils.logging.set_verbosity_error()
    logging.getLogger("peft").setLevel(logging.ERROR)
    pipe = getattr(diffusers, family.pipeline_class).from_pretrained(folder)
    return family, pipe, folder


def merged_by_diffusers(family, pipe, file):
    """The denoiser's weights after `load_lora_weights` and `fuse_lora`."""
    part = family.denoiser_component
    base = getattr(pipe, part)
    net = copy.deepcopy(base)
    setattr(pipe, part, net)
    try:
        pipe.load_lora_weights(file)
        pipe.fuse_lora(components=[part])
        pipe.unload_lora_weights()
    finally:
        setattr(pipe, part, base)
    before = base.state_dict()
    return {n: t for n, t in net.state_dict().items() if not torch.equal(t, before[n])}


def check_merged(family, pipe, folder, file):
    """Merged values are those of diffusers, and no others change."""
    want = merged_by_diffusers(family, pipe, file)
    made = Merged(file, family, folder)
    base = getattr(pipe, family.denoiser_component).state_dict()
    for name in {*want, *made}:
        value = made[name] if name in made else base[name]
        change = (want.get(name, base[name]) - base[name]).abs().max()
        torch.testing.assert_close(
            value, want.get(name, base[name]), atol=1e-5 * change.item() + 1e-6, rtol=1e-5
        )
    assert want


def targets_of(net, count, draw):
    """Names of some linear layers that have a bias, and of some that have none."""
    names = [n for n, m in net.named_modules() if isinstance(m, nn.Linear)]
    names = [n for n in names if any(part in n for part in ("attn", "attention"))]
    return draw.sample(names, min(count, len(names)))


def options(number, targets, draw):
    """What a trainer may have said, one after the other and mixed."""
    kinds = [
        {},
        dict(use_rslora=True),
        dict(use_dora=True),
        dict(rank_pattern={targets[0]: 2, targets[1]: 7}),
        dict(alpha_pattern={targets[0]: 1, targets[1]: 31}),
        dict(lora_bias=True),
    ]
    if number < len(kinds):
        return kinds[number]
    return {k: v for kind in draw.sample(kinds, 3) for k, v in kind.items()}


@pytest.mark.parametrize("number", range(9))
def test_what_peft_trains(stand_in, tmp_path, number):
    family, pipe, folder = stand_in
    draw = random.Random(number)
    torch.manual_seed(number)
    net = copy.deepcopy(getattr(pipe, family.denoiser_component))
    targets = targets_of(net, 6, draw)
    said = options(number, targets, draw)
    if said.get("lora_bias"):
        targets = [n for n in targets if net.get_submodule(n).bias is not None]
        if not targets:
            pytest.skip(f"{family.name} has no bias there")
    config = LoraConfig(
        r=draw.choice((2, RANK, 8)),
        lora_alpha=draw.choice((1, 3, 16)),
        target_modules=targets,
        init_lora_weights=False,
        **said,
    )
    net.add_adapter(config)
    for name, p in net.named_parameters():
        if "magnitude" in name:
            p.data *= 1.5
    if number % 2:
        net.half()
    part = family.denoiser_component
    parts = {
        f"{part}_lora_layers": get_peft_model_state_dict(net),
        f"{part}_lora_adapter_metadata": config.to_dict(),
    }
    pipe.save_lora_weights(tmp_path, **parts)
    check_merged(family, pipe, folder, tmp_path / "pytorch_lora_weights.safetensors")


def test_what_peft_writes(stand_in, tmp_path):
    """A folder of `PeftModel.save_pretrained`, against `merge_and_unload`."""
    family, pipe, folder = stand_in
    net = copy.deepcopy(getattr(pipe, family.denoiser_component))
    targets = targets_of(net, 4, random.Random(0))
    config = LoraConfig(
        r=RANK,
        lora_alpha=3,
        target_modules=targets,
        init_lora_weights=False,
        use_rslora=True,
        use_dora=True,
        rank_pattern={targets[0]: 2},
    )
    get_peft_model(net, config).save_pretrained(tmp_path)
    base = copy.deepcopy(getattr(pipe, family.denoiser_component))
    want = PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    made = Merged(tmp_path, family, folder)
    assert len(made) == len(targets)
    for name in made:
        torch.testing.assert_close(made[name], want[name], atol=1e-5, rtol=1e-5)


def plain(net, names, up=1):
    """Random down and up of layers."""
    made = {}
    for name in names:
        rows, columns = net.get_submodule(name).weight.shape[:2]
        made[name] = (torch.randn(RANK, columns) * 0.1, torch.randn(rows * up, RANK) * 0.1)
    return made


def file_of(path, pairs, write, down, up, alpha=None, **more):
    """Write pairs under the names of another trainer."""
    tensors = dict(more)
    for number, (name, (a, b)) in enumerate(pairs.items()):
        stem = write(name)
        tensors |= {f"{stem}.{down}.weight": a.contiguous(), f"{stem}.{up}.weight": b.contiguous()}
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha if number % 2 else 3.0)
    save_file(tensors, path)
    return path


FLUX_NAMES = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "transformer_blocks.0.attn.to_add_out": "double_blocks.0.txt_attn.proj",
    "single_transformer_blocks.0.proj_out": "single_blocks.0.linear2",
    "transformer_blocks.0.ff.net.2": "double_blocks.0.img_mlp.2",
}
KLEIN_NAMES = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "transformer_blocks.0.attn.to_add_out": "double_blocks.0.txt_attn.proj",
    "single_transformer_blocks.0.attn.to_out": "single_blocks.0.linear2",
    "transformer_blocks.0.ff.linear_out": "double_blocks.0.img_mlp.2",
}
QWEN_NAMES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.img_mlp.net.2")
ZIMAGE_NAMES = ("layers.0.attention.to_q", "layers.0.attention.to_out.0")
UNET_NAMES = tuple(
    f"down_blocks.1.attentions.0.transformer_blocks.0.{n}" for n in ("attn1.to_q", "ff.net.2")
)
KOHYA, PEFT = ("lora_down", "lora_up"), ("lora_A", "lora_B")


def flat(name):
    """As kohya-ss writes it."""
    return "lora_unet_" + name.replace(".", "_")


def layouts(family):
    """(layers, name -> name in the file, down and up, alpha) of trainers that diffusers knows."""
    if family in ("flux1", "kontext"):
        yield FLUX_NAMES, lambda n: f"transformer.{n}", PEFT, None
        yield FLUX_NAMES, lambda n: f"transformer.{n}", PEFT, 8.0
        yield FLUX_NAMES, lambda n: flat(FLUX_NAMES[n]), KOHYA, 8.0
        yield FLUX_NAMES, lambda n: flat(FLUX_NAMES[n]), KOHYA, None
    elif family == "klein":
        yield KLEIN_NAMES, lambda n: f"diffusion_model.{KLEIN_NAMES[n]}", PEFT, None
        yield KLEIN_NAMES, lambda n: flat(KLEIN_NAMES[n]), KOHYA, 8.0
        yield KLEIN_NAMES, lambda n: f"transformer.{n}", PEFT, None
    elif family in ("qwenimage", "zimage"):
        names = QWEN_NAMES if family == "qwenimage" else ZIMAGE_NAMES
        yield names, flat, KOHYA, 8.0
        yield names, flat, KOHYA, None
        yield names, lambda n: f"diffusion_model.{n}", PEFT, 8.0
        yield names, lambda n: f"diffusion_model.{n}", KOHYA, 2.0
        yield names, lambda n: n, ("lora_A.default", "lora_B.default"), None
    else:
        yield UNET_NAMES, flat, KOHYA, None
        yield UNET_NAMES, flat, KOHYA, 3.0
        yield UNET_NAMES, lambda n: f"unet.{n}", PEFT, None


def understood(family, pipe, folder, file):
    """Whether a file is taken; then its values are diffusers' own."""
    try:
        Merged(file, family, folder)
    except RecipeError as error:
        return str(error)
    check_merged(family, pipe, folder, file)
    return ""


def test_what_other_trainers_write(stand_in, tmp_path):
    family, pipe, folder = stand_in
    net = getattr(pipe, family.denoiser_component)
    taken = []
    for number, (names, write, pair, alpha) in enumerate(layouts(family.name)):
        torch.manual_seed(number)
        file = file_of(tmp_path / f"{number}.safetensors", plain(net, names), write, *pair, alpha)
        taken.append(understood(family, pipe, folder, file))
    refused = [reason for reason in taken if reason]
    assert not refused, refused


def test_nothing_in_a_file_is_ignored(stand_in, tmp_path):
    """A tensor more, or one less, in every layout: refused."""
    family, pipe, folder = stand_in
    net = getattr(pipe, family.denoiser_component)
    strange = (
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        "text_encoder.layers.0.q_proj.lora_A.weight",
        "something.else.weight",
        "something.else.alpha",
    )
    for number, (names, write, pair, alpha) in enumerate(layouts(family.name)):
        pairs = plain(net, names)
        first = write(next(iter(names)))
        more = (*strange, f"{first}.dora_scale", f"{first}.diff", f"{first}9.{pair[0]}.weight")
        for key in more:
            extra = torch.tensor(1.0) if key.endswith("alpha") else torch.ones(RANK, 8)
            file = tmp_path / f"{number}.safetensors"
            file_of(file, pairs, write, *pair, alpha, **{key: extra})
            with pytest.raises(RecipeError):
                Merged(file, family, folder)
        torn = load_file(file_of(tmp_path / "whole.safetensors", pairs, write, *pair, alpha))
        del torn[f"{first}.{pair[1]}.weight"]
        save_file(torn, tmp_path / "torn.safetensors")
        with pytest.raises(RecipeError):
            Merged(tmp_path / "torn.safetensors", family, folder)


def test_going_on_is_exact_or_refused(stand_in, tmp_path):
    """Rank, scale and layers of a file, against those of the run."""
    family, pipe, folder = stand_in
    part = family.denoiser_component
    net = copy.deepcopy(getattr(pipe, part))
    linear = [n for n, m in net.named_modules() if isinstance(m, nn.Linear)]
    wanted = ("attn2.to_q", "attn2.to_k") if part == "unet" else ("to_q", "to_k")
    targets = [n for n in linear if n.endswith(wanted)]
    linear = [*targets, *linear[:2]]
    fields = dict(lora_rank=RANK, lora_alpha=8.0, lora_targets=",".join(wanted))
    given = dict(model=family.name, **fields)

    def written(name, layers=targets, **said):
        """A file with adapters on some layers."""
        one = copy.deepcopy(getattr(pipe, part))
        base = dict(r=RANK, lora_alpha=8, target_modules=layers, init_lora_weights=False)
        config = LoraConfig(**base | said)
        one.add_adapter(config)
        state = get_peft_model_state_dict(one)
        more = {f"{part}_lora_adapter_metadata": config.to_dict()}
        pipe.save_lora_weights(tmp_path / name, **{f"{part}_lora_layers": state}, **more)
        return str(tmp_path / name), state

    path, state = written("own")
    run = family.empty_denoiser(folder)
    value = add_lora(run, family, resolve(**given, lora_path=path))
    for key, tensor in state.items():
        name = key.replace(".weight", ".default.weight")
        assert torch.equal(value(name, tensor.shape), tensor)
    for name, said, cure in (
        ("rslora", dict(use_rslora=True), "set lora_alpha=16"),
        ("dora", dict(use_dora=True), "use_dora, which is not trained here; merge it"),
        ("ranks", dict(rank_pattern={targets[0]: 2}), "of ranks [2, 4]"),
        ("alphas", dict(alpha_pattern={targets[0]: 2}), "scales [0.5, 2.0]"),
        ("fewer", dict(layers=targets[1:]), f"no adapter for {targets[0]}"),
        ("more", dict(layers=linear), "has an adapter for "),
    ):
        path = written(name, **said)[0]
        with pytest.raises(RecipeError) as refused:
            add_lora(family.empty_denoiser(folder), family, resolve(**given, lora_path=path))
        assert cure in str(refused.value), (name, str(refused.value))
    path = written("rslora", use_rslora=True)[0]
    add_lora(
        family.empty_denoiser(folder),
        family,
        resolve(**given | dict(lora_alpha=16, lora_path=path)),
    )


def test_settings_that_are_not_known(tmp_path):
    """A field of adapter_config.json that peft does not have, and starts that change the base."""
    family = get_family("qwenimage")
    folder = family.tiny(tmp_path / "base")
    net = family.load_denoiser(folder)
    config = LoraConfig(r=RANK, target_modules=["to_q"], init_lora_weights=False)
    get_peft_model(net, config).save_pretrained(tmp_path / "lora")
    about = tmp_path / "lora" / "adapter_config.json"
    fields = json.loads(about.read_text())
    for change, cure in (
        (dict(use_magic=True), "use_magic"),
        (dict(init_lora_weights="pissa"), "changes the weights of the base"),
        (dict(modules_to_save=["proj_out"]), "proj_out"),
        (dict(peft_type="SECRET"), "SECRET"),
    ):
        about.write_text(json.dumps(fields | change))
        with pytest.raises(RecipeError) as refused:
            Merged(tmp_path / "lora", family, folder)
        assert cure in str(refused.value), str(refused.value)
