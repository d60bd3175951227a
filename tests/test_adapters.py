"""Adapters of other people: merged as diffusers and peft merge them, or refused by name."""

import copy
import inspect
import json
import logging
import random
import re
import shutil

import diffusers
import pytest
import torch
from additions import added
from pairwise import one_of_three
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_unets import two_levels
from torch import nn

from sciftune.core.digests import DIGESTS_FILE
from sciftune.core.recipe import RecipeError, resolve
from sciftune.core.registry import records
from sciftune.lab.sample import Request, encoded_captions, find_weights, settled_request
from sciftune.models.family import get_family
from sciftune.models.weights import Weights, same_tensor
from sciftune.strategies.adapters.layers import add_lora
from sciftune.strategies.adapters.merging import Merged
from sciftune.strategies.adapters.reading import adapter_layers_of
from sciftune.strategies.adapters.saving import save_lora
from sciftune.training.export import export_damage, merge_lora

NO_LOADER = {name: why for more in added("NO_LOADER") for name, why in more.items()}
FAMILIES = [name for name in records("models") if name not in NO_LOADER]
RANK = 4


def test_families_without_a_loader():
    """Every family of the registry is tested here, or diffusers has no loader for it."""
    for name in NO_LOADER:
        family = get_family(name)
        assert not hasattr(diffusers, family.pipeline_class) and family.lora_layout == "peft"
    for name in FAMILIES:
        assert get_family(name).lora_layout == "diffusers" and loader_of(get_family(name))


def loader_of(family):
    """The class of diffusers that reads adapters for a pipeline."""
    kinds = getattr(diffusers, family.pipeline_class).__mro__
    return next(kind.__name__ for kind in kinds if kind.__name__.endswith("LoraLoaderMixin"))


def usual_first():
    """The first family of each loader; the others differ in size, and are slow."""
    seen = set()
    for name in FAMILIES:
        loader = loader_of(get_family(name))
        yield pytest.param(name, marks=pytest.mark.slow if loader in seen else ())
        seen.add(loader)


@pytest.fixture(scope="module", params=usual_first())
def stand_in(request, tmp_path_factory):
    """A family, its small pipeline, and the folder of it."""
    family = get_family(request.param)
    with two_levels(request.param):
        folder = family.tiny(tmp_path_factory.mktemp(request.param) / "base")
        pipe = family.build_tiny(**family.tiny_variants)
    diffusers.utils.logging.set_verbosity_error()
    logging.getLogger("peft").setLevel(logging.ERROR)
    for name in pipe._lora_loadable_modules:  # with the weights of the folder
        one = family.load_denoiser(folder) if name == family.denoiser_component else None
        setattr(pipe, name, one or family.load_text(folder / name, torch.float32, "cpu"))
    return family, pipe, folder


def fused(pipe, file, strength=1.0):
    """Component -> its copy after `load_lora_weights` and `fuse_lora`."""
    parts = [name for name in pipe._lora_loadable_modules if getattr(pipe, name, None) is not None]
    base = {name: getattr(pipe, name) for name in parts}
    copies = {name: copy.deepcopy(part) for name, part in base.items()}
    for name, part in copies.items():
        setattr(pipe, name, part)
    try:
        pipe.load_lora_weights(file)
        pipe.fuse_lora(components=parts, lora_scale=strength)
        pipe.unload_lora_weights()
    finally:
        for name, part in base.items():
            setattr(pipe, name, part)
    return copies


def check_merged(family, pipe, folder, file):
    """Merged values are those of diffusers in every component, and no others change."""
    made = Merged(file, family, folder)
    changed = dict(made.encoders) | {family.denoiser_component: made}
    some = False
    for part, want in fused(pipe, file).items():
        want, base = want.state_dict(), getattr(pipe, part).state_dict()
        some |= any(not torch.equal(want[name], base[name]) for name in base)
        values = changed.pop(part, {})
        values = {same_tensor(name, base): values[name] for name in values}
        for name in base:
            value, change = values.get(name, base[name]), (want[name] - base[name]).abs().max()
            limit = 1e-5 * change.item() + 1e-6
            torch.testing.assert_close(value, want[name], atol=limit, rtol=1e-5)
    assert some and not any(changed.values())


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
    mixed = {k: v for kind in draw.sample(kinds, 3) for k, v in kind.items()}
    if "use_dora" in mixed:
        mixed.pop("lora_bias", None)  # peft refuses the two together
    return mixed


@pytest.mark.parametrize("number", range(9))
def test_what_peft_trains(stand_in, tmp_path, number):
    family, pipe, folder = stand_in
    one_of_three(FAMILIES.index(family.name), number)
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


def layouts(family, net):
    """(layers, name -> name in the file, down and up, alpha) of trainers that diffusers knows."""
    part, loader = family.denoiser_component, loader_of(family)
    yield targets_of(net, 4, random.Random(1)), lambda n: f"{part}.{n}", PEFT, None
    if loader == "FluxLoraLoaderMixin":
        yield FLUX_NAMES, lambda n: f"transformer.{n}", PEFT, 8.0
        yield FLUX_NAMES, lambda n: flat(FLUX_NAMES[n]), KOHYA, 8.0
        yield FLUX_NAMES, lambda n: flat(FLUX_NAMES[n]), KOHYA, None
    elif loader == "Flux2LoraLoaderMixin":
        yield KLEIN_NAMES, lambda n: f"diffusion_model.{KLEIN_NAMES[n]}", PEFT, None
        yield KLEIN_NAMES, lambda n: flat(KLEIN_NAMES[n]), KOHYA, 8.0
        yield KLEIN_NAMES, lambda n: f"transformer.{n}", PEFT, None
    elif loader in ("QwenImageLoraLoaderMixin", "ZImageLoraLoaderMixin"):
        names = ZIMAGE_NAMES if loader.startswith("ZImage") else QWEN_NAMES
        names = [name for name in names if name in dict(net.named_modules())]
        yield names, flat, KOHYA, 8.0
        yield names, flat, KOHYA, None
        yield names, lambda n: f"diffusion_model.{n}", PEFT, 8.0
        yield names, lambda n: f"diffusion_model.{n}", KOHYA, 2.0
        yield names, lambda n: n, ("lora_A.default", "lora_B.default"), None
    elif part == "unet":
        yield UNET_NAMES, flat, KOHYA, None
        yield UNET_NAMES, flat, KOHYA, 3.0


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
    for number, (names, write, pair, alpha) in enumerate(layouts(family, net)):
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
        "text_encoder_2.encoder.layers.0.mlp.fc1.lora_A.weight",
        "text_encoder_3.encoder.layers.0.mlp.fc1.lora_A.weight",
        "something.else.weight",
        "something.else.alpha",
    )
    for number, (names, write, pair, alpha) in enumerate(layouts(family, net)):
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
        assert torch.equal(value(name, tensor.shape, None), tensor)
    for name, said, cure in (
        ("rslora", dict(use_rslora=True), "set lora_alpha=16"),
        ("dora", dict(use_dora=True), "set lora_kind=dora"),
        ("ranks", dict(rank_pattern={targets[0]: 2}), "set lora_rank"),
        ("alphas", dict(alpha_pattern={targets[0]: 2}), "set lora_alpha"),
        ("bias", dict(lora_bias=True), "lora_bias"),
        ("fewer", dict(layers=targets[1:]), f"no adapter for {targets[0]}"),
        ("more", dict(layers=linear), "has an adapter for "),
    ):
        path = written(name, **said)[0]
        with pytest.raises(RecipeError) as refused:
            add_lora(family.empty_denoiser(folder), family, resolve(**given, lora_path=path))
        assert cure in str(refused.value), (name, str(refused.value))
        if cure.startswith("set lora_") and name != "dora":
            continued(family, folder, resolve(**given, lora_path=path), refused=True)
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


TEXT = {
    name
    for name in FAMILIES
    if "text_encoder" in getattr(diffusers, get_family(name).pipeline_class)._lora_loadable_modules
}


def converts(family):
    """Whether the family's loader in diffusers reads the names of other trainers."""
    kinds = getattr(diffusers, family.pipeline_class).__mro__
    loader = next(kind for kind in kinds if kind.__name__ == loader_of(family))
    source = inspect.getsource(loader.lora_state_dict)
    return "kohya" in source or "non_diffusers" in source


@pytest.fixture
def with_text(stand_in):
    """A family whose adapters may change text encoders, and these."""
    family, pipe, folder = stand_in
    if family.name not in TEXT:
        pytest.skip(f"{loader_of(family)} reads no adapters of text encoders")
    names = [name for name in pipe._lora_loadable_modules if name.startswith("text_encoder")]
    return family, pipe, folder, {name: getattr(pipe, name) for name in names}


def of_kohya(part, name, several):
    """A layer of a text encoder as kohya-ss names it."""
    number = dict(text_encoder="1", text_encoder_2="2")[part] if several else ""
    return f"lora_te{number}_text_model_" + name.removeprefix("text_model.").replace(".", "_")


def of_diffusers(part, name, several):
    """As diffusers and peft name it, and with the prefix that CLIP had before transformers 5."""
    return f"{part}.text_model." + name.removeprefix("text_model.")


def of_memory(part, name, several):
    """As the model itself names it."""
    return f"{part}.{name}"


TEXT_LAYOUTS = (
    (of_kohya, KOHYA, None),
    (of_kohya, KOHYA, (8.0,)),
    (of_kohya, KOHYA, (8.0, 3.0, 3.0)),
    (of_diffusers, PEFT, None),
    (of_memory, PEFT, None),
    (of_diffusers, ("lora_linear_layer.down", "lora_linear_layer.up"), None),
)


def usual_layout(family):
    """The first layout that the family's loader reads."""
    return TEXT_LAYOUTS[0 if converts(family) else 3]


def text_file(path, family, pipe, encoders, layout, with_denoiser=True):
    """Write adapters of text encoders; returns what they mean: (encoder, weight) -> new value."""
    write, (down, up), alphas = layout
    kohya, net = write is of_kohya, getattr(pipe, family.denoiser_component)
    tensors, meaning = {}, {}
    several = kohya and (len(encoders) > 1 or family.denoiser_component == "transformer")
    for part, encoder in encoders.items():
        linear = [n for n, m in encoder.named_modules() if isinstance(m, nn.Linear)]
        linear = [n for n in linear if "self_attn" in n or "mlp" in n]
        for number, (name, (a, b)) in enumerate(plain(encoder, linear).items()):
            stem = write(part, name, several)
            tensors |= {f"{stem}.{down}.weight": a, f"{stem}.{up}.weight": b}
            scale = 1.0
            if alphas:
                tensors[f"{stem}.alpha"] = torch.tensor(alphas[number % len(alphas)])
                scale = alphas[number % len(alphas)] / RANK
            weight = encoder.get_submodule(name).weight.detach()
            meaning[part, f"{name}.weight"] = weight + scale * b @ a
    if with_denoiser:
        part = family.denoiser_component
        names = UNET_NAMES if part == "unet" else FLUX_NAMES
        if not converts(family):
            names = [f"transformer_blocks.0.{target}" for target in family.lora_targets[:2]]
        for name, (a, b) in plain(net, names).items():
            stem = f"{part}.{name}"
            if kohya:
                stem = flat(names[name] if part == "transformer" else name)
            one, two = (down, up) if kohya else PEFT
            tensors |= {f"{stem}.{one}.weight": a, f"{stem}.{two}.weight": b}
            if alphas:
                tensors[f"{stem}.alpha"] = torch.tensor(alphas[0])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return meaning


@pytest.mark.parametrize("number", range(len(TEXT_LAYOUTS)))
@pytest.mark.parametrize("with_denoiser", [True, False])
def test_text_encoders(with_text, tmp_path, number, with_denoiser):
    """Taken where diffusers applies what the file says, refused where it would not."""
    one_of_three(FAMILIES.index(with_text[0].name), number, with_denoiser)
    family, pipe, folder, encoders = with_text
    if TEXT_LAYOUTS[number][0] is of_kohya and not converts(family):
        pytest.skip(f"{loader_of(family)} reads no names of kohya-ss")
    torch.manual_seed(number)
    file = tmp_path / "text.safetensors"
    meaning = text_file(file, family, pipe, encoders, TEXT_LAYOUTS[number], with_denoiser)
    try:
        after = {part: net.state_dict() for part, net in fused(pipe, file).items()}
        faithful = all(
            torch.allclose(after[part][name], value, atol=1e-5)
            for (part, name), value in meaning.items()
        )
    except Exception:  # of any type: diffusers cannot load it
        faithful = False
    refused = understood(family, pipe, folder, file)
    assert bool(refused) != faithful, refused
    assert faithful or len(TEXT_LAYOUTS[number][2] or ()) > 1


def test_text_encoders_in_a_merged_folder(with_text, tmp_path):
    """`merge_lora` keeps the names and types of the base, and the pipeline loads the result."""
    family, pipe, folder, encoders = with_text
    base = shutil.copytree(folder, tmp_path / "base")
    (base / DIGESTS_FILE).unlink(missing_ok=True)
    for name in encoders:  # as published folders are
        file = base / name / "model.safetensors"
        old = load_file(file)
        old = {f"text_model.{n.removeprefix('text_model.')}": t.half() for n, t in old.items()}
        if "text_model.text_projection.weight" in old:
            old["text_projection.weight"] = old.pop("text_model.text_projection.weight")
        save_file(old, file, metadata=dict(format="pt"))
    file, out = tmp_path / "text.safetensors", tmp_path / "out"
    text_file(file, family, pipe, encoders, usual_layout(family))
    made = Merged(file, family, base)
    count = merge_lora(base, file, out, torch.float32)
    assert count == len(made) + sum(map(len, made.encoders.values()))
    want = fused(pipe, file)
    for name, encoder in family.load_encoders(out, parts=("text",)).text.items():
        assert set(Weights(out / name)) == set(Weights(base / name))
        after = want.get(name) or family.load_text(base / name, torch.float32, "cpu")
        for key, value in after.state_dict().items():
            torch.testing.assert_close(encoder.state_dict()[key], value, atol=2e-3, rtol=2e-3)
        if name in encoders:
            stored = Weights(out / name)
            assert {stored.dtype(n) for n in stored} == {torch.float16}
    net = family.load_denoiser(out).state_dict()
    for key, value in want[family.denoiser_component].state_dict().items():
        torch.testing.assert_close(net[key], value, atol=1e-5, rtol=1e-5)
    assert not export_damage(out)


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
def test_text_encoders_of_samples(with_text, tmp_path, strength):
    """Captions are encoded as by the pipeline after `fuse_lora` at the same scale."""
    one_of_three(FAMILIES.index(with_text[0].name), int(2.5 * strength))
    family, pipe, folder, encoders = with_text
    file = tmp_path / "text.safetensors"
    text_file(file, family, pipe, encoders, usual_layout(family))
    source = find_weights(file, base=folder)
    given = [settled_request(Request("a chart"), source)], torch.float32, "cpu", strength
    got = encoded_captions(source, *given)[("a chart", ())]
    base = family.load_encoders(folder, parts=("text",))
    plain_rows = family.encode_captions(base, ["a chart"])[0]
    base.text |= {n: net for n, net in fused(pipe, file, strength).items() if n in base.text}
    want = family.encode_captions(base, ["a chart"])[0]
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-4)
    assert any((got[n] - plain_rows[n]).abs().max() > 1e-3 for n in want) == (strength > 0)


def test_text_encoders_of_a_run(with_text, tmp_path):
    """A run trains the denoiser on cached captions, so it does not start from such a file."""
    family, pipe, folder, encoders = with_text
    file = tmp_path / "text.safetensors"
    text_file(file, family, pipe, encoders, usual_layout(family))
    recipe = resolve(model=family.name, lora_rank=RANK, lora_path=str(file))
    with pytest.raises(RecipeError, match="changes the text_encoder.*sciftune merge_lora"):
        add_lora(family.empty_denoiser(folder), family, recipe)


# Kinds of adapters in every file format


ORIGINAL = {  # names of the original releases -> layers of diffusers in their rows, in the key maps
    "flux1": {  # of ComfyUI (comfy.utils.flux_to_diffusers) and sd-scripts (networks.lora_flux)
        "double_blocks_{}_img_attn_qkv": [f"transformer_blocks.{{}}.attn.to_{n}" for n in "qkv"],
        "double_blocks_{}_txt_attn_qkv": [
            f"transformer_blocks.{{}}.attn.add_{n}_proj" for n in "qkv"
        ],
        "double_blocks_{}_img_attn_proj": ["transformer_blocks.{}.attn.to_out.0"],
        "double_blocks_{}_txt_attn_proj": ["transformer_blocks.{}.attn.to_add_out"],
        "double_blocks_{}_img_mlp_0": ["transformer_blocks.{}.ff.net.0.proj"],
        "double_blocks_{}_img_mlp_2": ["transformer_blocks.{}.ff.net.2"],
        "double_blocks_{}_txt_mlp_0": ["transformer_blocks.{}.ff_context.net.0.proj"],
        "double_blocks_{}_txt_mlp_2": ["transformer_blocks.{}.ff_context.net.2"],
        "single_blocks_{}_linear1": [
            *(f"single_transformer_blocks.{{}}.attn.to_{n}" for n in "qkv"),
            "single_transformer_blocks.{}.proj_mlp",
        ],
        "single_blocks_{}_linear2": ["single_transformer_blocks.{}.proj_out"],
    },
    "klein": {
        "double_blocks_{}_img_attn_qkv": [f"transformer_blocks.{{}}.attn.to_{n}" for n in "qkv"],
        "double_blocks_{}_img_attn_proj": ["transformer_blocks.{}.attn.to_out.0"],
        "single_blocks_{}_linear1": ["single_transformer_blocks.{}.attn.to_qkv_mlp_proj"],
        "single_blocks_{}_linear2": ["single_transformer_blocks.{}.attn.to_out"],
    },
    "zimage": {  # comfy.utils.z_image_to_diffusers
        f"{stack}_{{}}_attention_{end}": [f"{stack}.{{}}.attention.{n}" for n in parts]
        for stack in ("layers", "noise_refiner", "context_refiner")
        for end, parts in (("qkv", ("to_q", "to_k", "to_v")), ("out", ("to_out.0",)))
    },
}
WRITTEN = ("flux1", "klein", "qwenimage", "zimage", "sd15", "sdxl")
KINDS = {
    "lora": dict(lora_alpha=2, lora_ranks="to_q=2,to_k=3"),
    "rslora": dict(lora_rslora=True, lora_alphas="to_v=3"),
    "dora": dict(lora_kind="dora", lora_alpha=2),
    "lokr": dict(lora_kind="lokr", lora_alpha=2, lora_ranks="to_q=2"),
    "lokr of a factor": dict(lora_kind="lokr", lora_factor=4, lora_rank=64),
}


def foreign_names(name, layers):
    """What a program calls a layer, with underscores -> layers of diffusers in its rows."""
    known = {layer.replace(".", "_"): [layer] for layer in layers}
    for pattern, parts in ORIGINAL.get(name, {}).items():
        for number in range(8):
            made = [part.format(number) for part in parts]
            if made[0] in layers:
                known[pattern.format(number)] = made
    return known


def as_comfyui_patches(name, tensors, weights):
    """New weights by layer, as ComfyUI computes them (comfy.weight_adapter, lora and lokr)."""
    layers = {n.removesuffix(".weight") for n in weights}
    known, stems, changed = foreign_names(name, layers), {}, {}
    for key, value in tensors.items():
        stem, leaf = re.fullmatch(r"(.+?)\.((?:lora|lokr)_.+|alpha|dora_scale)", key).groups()
        stems.setdefault(stem, {})[leaf] = value
    for stem, own in stems.items():
        prefix = next(
            p for p in ("lora_unet_", "diffusion_model.", "lycoris_") if stem.startswith(p)
        )
        parts = known[stem.removeprefix(prefix).replace(".", "_")]
        base = torch.cat([weights[f"{part}.weight"] for part in parts])
        if prefix == "lycoris_":
            thin = own.get("lokr_w2_b")
            second = own["lokr_w2"] if thin is None else own["lokr_w2_a"] @ thin
            scale = 1.0 if thin is None else own["alpha"].item() / len(thin)
            first = own["lokr_w1"]
            first = first[..., None, None] if second.ndim == 4 else first
            change = torch.kron(first, second)
        else:
            down, up = ("down", "up") if "lora_down.weight" in own else ("A", "B")
            down, up = own[f"lora_{down}.weight"], own[f"lora_{up}.weight"]
            change, scale = up.flatten(1) @ down.flatten(1), own["alpha"].item() / len(down)
        new = base + scale * change.reshape(base.shape)
        if "dora_scale" in own:
            sizes = new.flatten(1).norm(dim=1).reshape(-1, *[1] * (new.ndim - 1))
            new = new * own["dora_scale"].reshape(sizes.shape) / sizes
        rows = [len(weights[f"{part}.weight"]) for part in parts]
        changed |= dict(zip((f"{part}.weight" for part in parts), new.split(rows), strict=True))
    return changed


def trained_as(family, folder, fields):
    """A recipe, an adapted network with random values, its adapters, and the merged weights."""
    recipe = resolve(**dict(model=family.name, lora_rank=RANK) | fields)
    net = family.load_denoiser(folder)
    add_lora(net, family, recipe)
    adapters = {n: p for n, p in net.named_parameters() if p.requires_grad}
    for name, p in adapters.items():
        p.data = p.data * 1.3 if "magnitude" in name else torch.randn(p.shape) * 0.1
    merged = {}
    for name, layer in adapter_layers_of(copy.deepcopy(net)).items():
        layer.merge()
        merged[f"{name}.weight"] = layer.get_base_layer().weight.detach()
    return recipe, net, adapters, merged


def continued(family, folder, recipe, refused=False):
    """A network that goes on from `lora_path`, with the fields that a refusal asks for.

    Scales of joined layers are one in other programs' files, and LoKr's are in its factors.
    """
    net = family.load_denoiser(folder)
    try:
        add_lora(net, family, recipe)
        return net
    except RecipeError as error:
        assert refused, str(error)
        cures = str(error).split("; set ")[1].split(" and ")
    cures = dict(cure.split("=", 1) for cure in cures)
    kinds = {name: type(getattr(recipe, name)) for name in cures}
    fields = {name: kinds[name](value.strip("'")) for name, value in cures.items()}
    net = family.load_denoiser(folder)
    add_lora(net, family, recipe.model_copy(update=fields))
    return net


LAYOUTS = ("diffusers", "kohya", "comfyui")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_in_every_format(stand_in, tmp_path, kind, layout):
    """Written, read by another program, merged, and continued: the same weights."""
    one_of_three(FAMILIES.index(stand_in[0].name), list(KINDS).index(kind), LAYOUTS.index(layout))
    family, pipe, folder = stand_in
    if family.name not in WRITTEN:
        pytest.skip("shares its layers with another family")
    torch.manual_seed(0)
    fields = KINDS[kind] | dict(lora_format=layout, trigger="sks")
    recipe, net, adapters, want = trained_as(family, folder, fields)
    save_lora(adapters, family, recipe, folder, tmp_path / "lora")
    (file,) = (tmp_path / "lora").glob("*.safetensors")
    tensors, weights = load_file(file), family.denoiser_weights(folder)
    if layout != "diffusers":
        patched = as_comfyui_patches(family.name, tensors, weights)
        alphas = {k: t for k, t in tensors.items() if k.endswith(".alpha")}
        assert alphas and all(t.ndim == 0 for t in alphas.values())
        with safe_open(file, "pt") as header:
            about = header.metadata()
        assert about["ss_network_dim"] == str(recipe.lora_rank) and about["ss_seed"] == "0"
        assert about["modelspec.trigger_phrase"] == "sks"
    elif file.name.startswith("pytorch_lora"):
        patched = fused(pipe, file)[family.denoiser_component].state_dict()
    else:
        base = family.load_denoiser(folder)
        patched = PeftModel.from_pretrained(base, tmp_path / "lora").merge_and_unload().state_dict()
    merged = Merged(tmp_path / "lora", family, folder)
    for name, value in want.items():
        torch.testing.assert_close(patched[name].float(), value, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged[name], value, atol=1e-5, rtol=1e-5)
        assert (value - weights[name]).abs().max() > 1e-3
    go_on = recipe.model_copy(update=dict(lora_path=str(tmp_path / "lora")))
    if family.name == "flux1" and kind == "dora" and layout != "diffusers":
        targets = ",".join((*family.lora_targets, "proj_mlp"))  # sizes of a joined layer are whole
        go_on = go_on.model_copy(update=dict(lora_targets=targets))
    more = continued(family, folder, go_on, refused=layout != "diffusers")
    for name, layer in adapter_layers_of(more).items():
        layer.merge()
        value, usual = layer.get_base_layer().weight, weights[f"{name}.weight"]
        torch.testing.assert_close(value, want.get(f"{name}.weight", usual), atol=1e-5, rtol=1e-5)


def test_diffusers_reads_what_is_written_for_sd_scripts(stand_in, tmp_path):
    """Its own converters of kohya's names give the same weights."""
    family, pipe, folder = stand_in
    if family.name not in WRITTEN:
        pytest.skip("shares its layers with another family")
    torch.manual_seed(0)
    fields = dict(KINDS["lora"], lora_format="kohya")
    if family.name == "flux1":  # diffusers' converter has the width of its single blocks built in
        block = "transformer_blocks.0.attn.to_"
        fields["lora_targets"] = ",".join(block + end for end in ("q", "k", "v", "out.0"))
    recipe, _, adapters, want = trained_as(family, folder, fields)
    save_lora(adapters, family, recipe, folder, tmp_path / "lora")
    file = tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    read = fused(pipe, file)[family.denoiser_component].state_dict()
    for name, value in want.items():
        torch.testing.assert_close(read[name], value, atol=1e-5, rtol=1e-5)


def trained_behind_frozen_input(fields):
    "Train compiled, recomputed blocks whose first input needs no gradient; their weights."
    from torch.utils.checkpoint import checkpoint

    from sciftune.project.ranks import toy_engine, toy_loss, toy_module
    from sciftune.strategies.compilation import gather_whole_blocks

    class Recomputed(nn.Sequential):
        def forward(self, x):
            for module in self:
                x = checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)
            return x

    engine, module = toy_engine(**fields), Recomputed(*toy_module())
    module[2].requires_grad_(False)
    if engine.world > 1:
        for block in module[:2]:
            block.forward = torch.compile(block.forward, backend="aot_eager")
        gather_whole_blocks(module, ("QwenImageTransformerBlock",))
    net = engine.network(module)
    for step in range(2):
        for i in range(engine.accumulation):
            loss = toy_loss(net, step, i * engine.world + engine.rank)
            net.backward(loss, last=i == engine.accumulation - 1)
        net.step()
    return dict(held={r.name: (r.start, net.read(r, "weight").clone()) for r in net.held()})


def test_compiled_blocks_behind_frozen_weights_under_zero3():
    "The first block's gradients are those of one process, although its input has none."
    from sciftune.project.ranks import joined, on_ranks

    torch.set_num_threads(1)
    (alone,) = on_ranks(trained_behind_frozen_input, 1, dict(strategy="single"))
    two = dict(strategy="zero3", num_processes=2)
    ranks = on_ranks(trained_behind_frozen_input, 2, two)
    for name, (_, values) in alone["held"].items():
        assert torch.allclose(joined(ranks, name), values, atol=1e-6), name
