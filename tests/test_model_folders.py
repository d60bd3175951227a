"""A model folder in which a file is missing, empty, cut off or no longer itself is refused.

Every file of the stand-in of every family, and of the layouts that larger or older folders have:
weights in several files with an index, a tokenizer of vocab.json and merges.txt. What is refused
names the file; what is accepted nobody reads.
"""

import json
import os
import random
import shutil

import pytest
from safetensors.torch import load_file, save_file

from sciftune.core.registry import records
from sciftune.models.family import get_family

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


LAYOUTS = {name: (name, lambda folder: None) for name in records("models")}
LAYOUTS["klein in two files"] = "klein", in_two_files
LAYOUTS["sd15 with merges"] = "sd15", in_byte_pairs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_file_is_refused_by_name(layout, tmp_path):
    name, rearrange = LAYOUTS[layout]
    family = get_family(name)
    whole, place = family.tiny(tmp_path / "whole"), tmp_path / "given"
    rearrange(whole)
    family.check_files(whole)
    tried = 0
    for file in sorted(file for file in whole.rglob("*") if file.is_file()):
        for damage, change in DAMAGES.items():
            shutil.copytree(whole, place, copy_function=os.link)
            given = place / file.relative_to(whole)
            given.unlink()
            if change:
                given.write_bytes(change(file.read_bytes()))
            said = refusal(family, place)
            shutil.rmtree(place)
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
