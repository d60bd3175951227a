"""What BAGEL adds to tables of tests/; see tests/tools/additions.py."""

import json


def records():
    """Lines of all forms that unified training reads."""
    name = "rgb.png"
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "noise"}]
    target = dict(type="image", path=name, role="target", encoders=["vae"])
    return [
        dict(text_prompt="x", image_path=name),
        dict(image=[name], conversations=turns),
        dict(segments=[dict(type="text", text=["x"]), target]),
        dict(
            messages=[dict(role="user", content="<image>"), dict(role="assistant", content="x")],
            images=[name],
        ),
        dict(
            input_sequence=[dict(type="text", content="x")],
            target_sequence=[dict(type="image", image_path=name)],
        ),
    ]


def containers(data, lines, parquet_bytes):
    """File name -> content, from pictures."""
    return {
        "bagel.jsonl": lines(records()),
        "t2i.parquet": parquet_bytes(image=data, captions=[json.dumps(dict(a="x"))] * len(data)),
        "edits.parquet": parquet_bytes(
            image_list=[data[:2]] * 6, instruction_list=[[["x", "y"]]] * 6
        ),
    }


def check_container(path, outcome):
    """Whether anything of a damaged file can be read, and all of that; None for other files."""
    from sciftune.extras.bagel.released import open_parquet
    from sciftune.extras.bagel.sequences import decoded_image, open_examples

    if path.name not in ("bagel.jsonl", "t2i.parquet", "edits.parquet"):
        return None
    read = open_examples if path.suffix == ".jsonl" else open_parquet
    found = outcome(lambda place: read(place, max_bad_fraction=1), path)
    for example in found or ():
        assert example.where
        for file in () if example.fault else example.files:
            decoded_image(file)
    return bool(found)


def list_reader(file):
    """Read a list of sequences."""
    from sciftune.extras.bagel.sequences import read_lines

    return read_lines(file)


ALONE = "extras/bagel/parts.sampled_digest"  # hashed in pieces, whatever it holds
CONTAINERS = containers
CHECKED = check_container
TEXT_FILES = {"bagel.jsonl": list_reader}
MODEL_FOLDERS = ["bagel"]
EXPORTS = ["bagel"]
NO_LOADER = dict(bagel="a layout of its own: no pipeline of diffusers, adapters in peft's files")
BASES = {"text and images": dict(model="bagel")}
UNIFIED = dict(model="bagel", objective="unified")
UNDERSTOOD = [
    (UNIFIED | dict(num_workers=1), dict(data_workers=0)),
    (
        UNIFIED | dict(model_path="a", llm_path="b", vit_path="c", vae_path="d"),
        dict(model_path="a"),
    ),
]
NAMES_REFUSED = [
    (
        UNIFIED | dict(num_workers=4),
        ("data_workers: needs objective", "a thread makes the batches"),
    ),
]
PARTS_MISSING = [  # title, sentence, family, file
    (
        "BAGEL without vit_config.json",
        "FOLDER/given/vit_config.json is missing, and the weights hold a vision tower",
        "bagel",
        "vit_config.json",
    ),
    (
        "BAGEL without its tokenizer",
        "FOLDER/given has no vocabulary (tokenizer.json, or",
        "bagel",
        "tokenizer.json",
    ),
]
PARTS = dict(model="bagel", model_path="parts", llm_path="qwen")
FROZEN = dict(model="bagel", lora_rank=4, freeze_llm=True)
REFUSED = [  # topic, sentence, parameters
    ("Recipe", "model_path: 'parts' needs model 'bagel'", dict(model_path="parts")),
    ("Recipe", "model_path: 'parts' needs vit_path and vae_path", PARTS),
    ("Recipe", "vae_path: needs model_path='parts'", dict(model="bagel", vae_path="ae.bin")),
    ("Recipe", "lora_path: needs objective", dict(model="bagel", lora_rank=4, lora_path="a")),
    ("Recipe", "freeze_llm: with lora_rank 4 the whole base is frozen already", FROZEN),
]
