"""A model folder in which a file is missing, empty, cut off or no longer itself is refused.

Every file of every stand-in, and of the layouts that larger or older folders have:
weights in several files with an index, a tokenizer of vocab.json and merges.txt. What is refused
names the file; what is accepted nobody reads.
"""

import json
import os
import random
import shutil

import pytest
import torch
from one_file import in_one_file
from pairwise import one_of_three
from safetensors.torch import load_file, save_file

from sciftune.core.recipe import resolve
from sciftune.core.registry import records
from sciftune.lab.convert import merge_command
from sciftune.models import single_file
from sciftune.models.family import get_family
from sciftune.models.single_file import single_file_folder
from sciftune.strategies.adapters.layers import add_lora
from sciftune.strategies.adapters.saving import save_lora
from sciftune.training.export import write_component

UNREAD = {"stand_in.json", "generation_config.json"}
DAMAGES = {
    "removed": None,
    "emptied": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "garbage": lambda content: random.Random(0).randbytes(max(64, len(content))),
}


def in_two_files(folder):
    "The denoiser's weights as a large model has them: two files and their index."
    single = folder / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, single.with_name(file))
        where |= dict.fromkeys(part, file)
    index = single.with_name(f"{single.name}.index.json")
    index.write_text(json.dumps(dict(metadata={}, weight_map=where)))


def in_byte_pairs(folder):
    "The tokenizer as older folders have it, in vocab.json and merges.txt."
    place = folder / "tokenizer"
    model = json.loads((place / "tokenizer.json").read_text())["model"]
    (place / "tokenizer.json").unlink()
    pairs = [f"{a} {b}" for a in "abcdefgh" for b in "aeiou"]
    words = [*model["vocab"], *(pair.replace(" ", "") for pair in pairs)]
    (place / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (place / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))


def stand_ins():
    "A family of each stand-in: the files of others are the same."
    names = {}
    for name in records("models"):
        family = get_family(name)
        names.setdefault((type(family).build_tiny, str(family.tiny_config)), name)
    return names.values()


LAYOUTS = {name: (name, lambda folder: None) for name in stand_ins()}
LAYOUTS["klein in two files"] = "klein", in_two_files
LAYOUTS["sd15 with merges"] = "sd15", in_byte_pairs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_file_is_refused_by_name(layout, tmp_path):
    name, rearrange = LAYOUTS[layout]
    family = get_family(name)
    whole, place = family.tiny(tmp_path / "whole"), tmp_path / "given"
    rearrange(whole)
    family.check_files(whole)
    shutil.copytree(whole, place, copy_function=os.link)
    tried = 0
    for file in sorted(file for file in whole.rglob("*") if file.is_file()):
        given = place / file.relative_to(whole)
        for damage, change in DAMAGES.items():
            given.unlink()
            if change:
                given.write_bytes(change(file.read_bytes()))
            said = refusal(family, place)
            given.unlink(missing_ok=True)
            os.link(file, given)
            if file.name in UNREAD:
                assert not said, (file, damage, said)
                continue
            assert named(file, said), (f"{file.relative_to(whole)} {damage}", said)
            tried += 1
    assert tried >= 28


def refusal(family, folder):
    "The sentence with which a folder is refused; '' = it is taken."
    try:
        family.check_files(folder)
    except ValueError as error:
        return str(error)
    return ""


def named(file, said):
    "Whether a sentence names the file and says what is wrong in one line."
    return file.name in said and "\n" not in said and len(said) < 700


# A base in one file


def as_float8(tensors):
    """ComfyUI's scaled fp8: a scale for a weight, or for its rows; returns it and its meaning."""
    stored, meaning = {}, {}
    for number, (name, value) in enumerate(tensors.items()):
        if not name.endswith(".weight") or value.ndim != 2:
            stored[name] = meaning[name] = value.bfloat16()
            continue
        most = value.abs().amax(1) if number % 2 else value.abs().amax()
        scale = (most / 448).clamp(min=1e-6)
        rows = scale[:, None] if scale.ndim else scale
        stored[name] = (value / rows).to(torch.float8_e4m3fn)
        meaning[name] = (stored[name].float() * rows).bfloat16()
        kind = "weight_scale" if number % 3 else "scale_weight"
        stored[f"{name.removesuffix('.weight')}.{kind}"] = scale
        stored[f"{name.removesuffix('.weight')}.input_scale"] = torch.ones(())
    return stored | {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, meaning


KINDS = ("fp32", "bf16", "fp8")
IN_ONE_FILE = ("flux1", "klein", "qwenimage", "zimage", "sd15", "sdxl")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IN_ONE_FILE)
def test_a_base_in_one_file(name, kind, tmp_path):
    """The same weights as the folder that the file was made of, read one tensor at a time."""
    one_of_three(IN_ONE_FILE.index(name), KINDS.index(kind))
    family = get_family(name)
    folder, file = family.tiny(tmp_path / "base"), tmp_path / "model.safetensors"
    given = meaning = in_one_file(name, folder)
    if kind == "bf16":
        given = meaning = {n: t.bfloat16() for n, t in given.items()}
    elif kind == "fp8":
        given, meaning = as_float8(given)
    save_file({n: t.contiguous() for n, t in given.items()}, file)
    made = single_file_folder(family, file, str(folder), "", tmp_path / "cache")
    assert single_file_folder(family, file, str(folder), "", tmp_path / "cache") == made
    family.check_files(made)
    want, net = family.load_denoiser(folder).state_dict(), family.load_denoiser(made)
    limit = dict(fp32=0.0, bf16=2**-8, fp8=2**-3)[kind]
    for key, value in net.state_dict().items():
        assert (value - want[key]).abs().max() <= limit * want[key].abs().max(), key
    numbers = sum(t.double().sum() for n, t in meaning.items() if "first_stage" not in n)
    total = sum(p.double().sum() for p in net.parameters())
    torch.testing.assert_close(total, numbers, rtol=1e-9, atol=1e-6)
    weights = family.denoiser_weights(made)
    key = next(n for n in weights if n.endswith("to_q.weight"))
    assert torch.equal(weights.slice(key, 1, 3).float(), weights[key][1:3].float())
    vae, coder = family.load_vae(folder).state_dict(), family.load_vae(made).state_dict()
    assert all((coder[n] - vae[n]).abs().max() <= limit * vae[n].abs().max() for n in vae)
    out = family.save_pipeline(made, export_of(family, made, tmp_path), tmp_path / "out")
    read = family.load_denoiser(out).state_dict()
    assert all(torch.equal(read[n], value) for n, value in net.state_dict().items())


def export_of(family, base, tmp_path):
    """The denoiser of a base, written as a run does."""
    weights = family.denoiser_weights(base)
    write_component({}, weights, tmp_path / "component", None)
    config = (base / family.denoiser_component / "config.json").read_bytes()
    (tmp_path / "component" / "config.json").write_bytes(config)
    return tmp_path / "component"


def test_adapters_are_merged_into_a_base_in_one_file(tmp_path):
    """The merged folder is that of the pipeline folder which the file was made of."""
    family = get_family("flux1")
    base, file = family.tiny(tmp_path / "base"), tmp_path / "model.safetensors"
    save_file({n: t.contiguous() for n, t in in_one_file("flux1", base).items()}, file)
    recipe, net = resolve(model="flux1", lora_rank=2), family.load_denoiser(base)
    add_lora(net, family, recipe)
    values = {n: torch.randn(p.shape) for n, p in net.named_parameters() if p.requires_grad}
    save_lora(values, family, recipe, base, tmp_path / "lora")
    parts = ["--model", "flux1", "--text_encoder_path", str(base)]
    for source, more, name in ((base, [], "folder"), (file, parts, "file")):
        words = [source, tmp_path / "lora", tmp_path / name]
        merge_command([*map(str, words), "--dtype", "float32", *more])
    read = [family.load_denoiser(tmp_path / name).state_dict() for name in ("folder", "file")]
    plain = family.load_denoiser(base).state_dict()
    assert all(torch.equal(value, read[1][n]) for n, value in read[0].items())
    assert any(not torch.equal(value, plain[n]) for n, value in read[0].items())
    family.load_vae(tmp_path / "file")  # parts beside the denoiser are copies
    family.load_encoders(tmp_path / "file")


def test_parts_of_a_base_in_one_file(tmp_path, monkeypatch):
    """Folders of their own, what is missing by name, and one tensor in memory."""
    family = get_family("klein")
    folder, file = family.tiny(tmp_path / "base"), tmp_path / "model.safetensors"
    save_file({n: t.contiguous() for n, t in in_one_file("klein", folder).items()}, file)
    text = tmp_path / "text"
    for name in ("text_encoder", "tokenizer"):
        shutil.copytree(folder / name, text, dirs_exist_ok=True)
    parts = family, file, str(text), str(folder / "vae"), tmp_path / "cache"
    with pytest.raises(
        ValueError, match="of the size in config.json"
    ):  # the published size is expected
        family.load_denoiser(single_file_folder(*parts))
    encoders = family.load_encoders(single_file_folder(*parts))
    rows = family.encode_captions(encoders, ["a chart"])[0]
    want = family.encode_captions(family.load_encoders(folder), ["a chart"])[0]
    assert all(torch.equal(rows[n], want[n]) for n in want)
    with pytest.raises(ValueError, match="autoencoder_path: model.safetensors holds no autoenc"):
        single_file_folder(family, file, str(text), "", tmp_path / "cache")
    with pytest.raises(ValueError, match="is no file here"):
        single_file_folder(family, tmp_path / "none.safetensors", str(folder), "", tmp_path)
    flux = get_family("flux1")
    with pytest.raises(ValueError, match="text_encoder and text_encoder_2; give a pipeline"):
        single_file_folder(flux, file, str(text), "", tmp_path / "cache")
    made = single_file_folder(flux, file, str(flux.tiny(tmp_path / "flux")), "", tmp_path / "cache")
    with pytest.raises(ValueError, match="model.safetensors.*holds no FluxTransformer2DModel"):
        flux.load_denoiser(made)
    made, read = single_file_folder(family, file, str(folder), "", tmp_path / "cache"), []
    usual = single_file.open_weights

    class Counted:
        def __init__(self, place):
            self.inner = usual(place)

        def get_tensor(self, name):
            read.append(name)
            return self.inner.get_tensor(name)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(single_file, "open_weights", Counted)
    weights = family.denoiser_weights(made)
    assert not read
    weights["transformer_blocks.0.attn.to_k.weight"]
    assert read == ["model.diffusion_model.double_blocks.0.img_attn.qkv.weight"]
