"""Lists, folders and shards of sequences account for all files; the preset's values."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sciftune.core.presets import preset_values
from sciftune.core.recipe import resolve
from sciftune.extras.bagel.unified.data import open_groups
from sciftune.project.pages import presets_markdown

OTHER = {"notes.doc": b"?", "sub/old.doc": b"?", ".hidden": b"?", "sub/lone.heic": b"?"}


def png(shade=0):
    data = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 0, 0)).save(data, "PNG")
    return data.getvalue()


def counts(line):
    """Count the files in an account, those that are read and the others."""
    used, _, left = line.partition("; not read: ")

    def total(text):
        return sum(int(word) for word in text.replace("(", " ").split() if word.isdigit())

    return total(used.partition(": ")[2]), total(left.replace("sub/", ""))


def bagel_lines(tmp_path, data):
    fields = dict(model="bagel", objective="unified", held_out=0, run_root=str(tmp_path))
    groups, _ = open_groups(resolve(**fields, data=str(data)))
    return [line for group in groups for line in group.notes]


def sequences(root, names=("a", "b")):
    for name in names:
        (root / f"{name}.png").write_bytes(png())
        lines = [json.dumps(dict(text_prompt="x", image_path=f"./{name}.png"))]
        (root / f"{name}.jsonl").write_text("\n".join(lines))


def test_bagel_accounts_for_lists_and_folders(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    sequences(root)
    for other, data in OTHER.items():
        (root / other).parent.mkdir(exist_ok=True)
        (root / other).write_bytes(data)
    (line,) = bagel_lines(tmp_path, root)
    assert "2 x image, 2 x list" in line and counts(line) == (4, len(OTHER)), line
    (line,) = bagel_lines(tmp_path, root / "a.jsonl")
    assert line == f"files of {root}/a.jsonl: 1 x image, 1 x list"


def test_bagel_accounts_for_shards(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    columns = dict(image=[png(0), png(1)], captions=[json.dumps(dict(a="x"))] * 2)
    pq.write_table(pa.table(columns), root / "a.parquet")
    (root / "notes.doc").write_bytes(b"?")
    (line,) = bagel_lines(tmp_path, root)
    assert counts(line) == (1, 1) and "1 x shard" in line, line
    info = dict(t2i_pretrain=dict(own=dict(data_dir="data", num_files=1, num_total_samples=2)))
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    group = "{dataset_names: [own], num_used_data: [1], weight: 1}"
    (tmp_path / "mix.yaml").write_text(f"t2i_pretrain: {group}")
    (line,) = bagel_lines(tmp_path, tmp_path / "mix.yaml")
    assert counts(line) == (1, 1) and "1 x shard" in line, line


def test_values_of_the_preset():
    values = preset_values("bagel", "bagel_fsdp")
    names = ("learning_rate", "steps", "warmup_steps", "checkpoint_steps", "log_steps")
    assert [values[name] for name in names] == [1e-5, 50000, 1000, 1000, 10]
    assert (values["global_batch"], values["micro_batch"], values["num_processes"]) == (
        64,
        1,
        8,
    )
    assert "| `global_batch` | `64` | `64` |" in presets_markdown()
