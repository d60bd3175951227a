"""Captions by a text encoder: in order, each once, the same whatever was killed or batched."""

import io
import json
import random
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sciftune.core.files import FileError
from sciftune.data.sources import open_collection
from sciftune.extras.papers import caption as module
from sciftune.extras.papers.caption import describe_collection, writing_model
from sciftune.lab.command import packaged_notebooks
from sciftune.models.family import get_family

WRITING = ("qwenimage", "qwenimage_edit", "qwenimage21", "flux2_dev")


def png(i, size):
    file = io.BytesIO()
    random.seed(i)
    Image.frombytes("RGB", size, random.randbytes(3 * size[0] * size[1])).save(file, "PNG")
    return file.getvalue()


def rows(count):
    "Pictures of several shapes; some have a caption, words or a document."
    for i in range(count):
        row = dict(labels=[f"{i} mW"] if i % 2 else [], document="a.pdf" if i % 3 else None)
        yield png(i, (60 + 40 * (i % 3), 90)), row | dict(caption=f"old {i}" if i % 4 else "")


def write_list(folder, count):
    folder.mkdir()
    lines = []
    for i, (data, row) in enumerate(rows(count)):
        (folder / f"{i}.png").write_bytes(data)
        lines.append(json.dumps(row | dict(file_name=f"{i}.png")))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def write_parquet(folder, count):
    folder.mkdir()
    table = [dict(row, image=data) for data, row in rows(count)]
    pq.write_table(pa.Table.from_pylist(table), folder / "a.parquet", row_group_size=3)


def write_tar(folder, count):
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i, (data, row) in enumerate(rows(count)):
            for suffix, part in (("png", data), ("json", json.dumps(row).encode())):
                member = tarfile.TarInfo(f"{i:02}.{suffix}")
                member.size = len(part)
                tar.addfile(member, io.BytesIO(part))


class Echo:
    "A writer that says what it was asked; it refuses long pictures and counts the others."

    identity = "echo"

    def __init__(self):
        self.asked = []

    def write(self, pictures, prompts, system, longest):
        if any(max(p.size) > 9 * min(p.size) for p in pictures):
            raise ValueError("too long")
        self.asked += prompts
        return [
            f"{p.width}x{p.height} {q.splitlines()[1:]}"
            for p, q in zip(pictures, prompts, strict=True)
        ]


@pytest.fixture
def echo(monkeypatch):
    writer = Echo()
    family = get_family("qwenimage")
    monkeypatch.setattr(family, "load_writer", lambda path, device: writer, raising=False)
    monkeypatch.setattr(module, "writing_model", lambda model, path: (family, "x"))
    return writer


@pytest.mark.parametrize("write", [write_list, write_parquet, write_tar])
def test_a_described_collection_is_one_that_a_run_reads(tmp_path, echo, write):
    write(tmp_path / "data", 11)
    made = describe_collection(str(tmp_path / "data"), tmp_path / "out", "qwenimage", batch=3)
    new = open_collection(tmp_path / "out", areas=("quoted",))
    before = module._opened(str(tmp_path / "data"), None, tmp_path / "out")
    assert (new.ids, new.digests) == (before.ids, before.digests) and len(new) == 11
    assert (new.documents, new.words) == (before.documents, before.words) and not made.left_out
    for i, (_, row) in enumerate(rows(11)):
        first, *others = new.captions[i]
        assert first.startswith(f"{60 + 40 * (i % 3)}x90") and ("mW" in first) == bool(i % 2)
        assert others == ([row["caption"]] if row["caption"] else [])


def test_a_refused_picture_is_listed_and_the_others_are_described(tmp_path, echo):
    write_list(tmp_path / "data", 8)
    (tmp_path / "data/5.png").write_bytes(png(5, (200, 4)))
    (tmp_path / "data/3.png").write_bytes(b"\x89PNG")
    made = describe_collection(str(tmp_path / "data"), tmp_path / "out", "qwenimage", keep=False)
    reasons = {row["source"]: row["reason"] for row in made.left_out}
    assert reasons.pop("metadata.jsonl:6") == "cannot be described: too long"
    assert list(reasons) == ["metadata.jsonl:4"]
    assert [row["id"] for row in made.rows] == [f"{i}.png" for i in (0, 1, 2, 4, 6, 7)]
    assert all(len(row["captions"]) == 1 for row in made.rows)


def test_a_call_that_was_killed_goes_on(tmp_path, echo):
    "Cut anywhere, the journal loses at most the batch that was not written."
    write_list(tmp_path / "data", 12)
    (tmp_path / "data/5.png").write_bytes(png(5, (200, 4)))
    whole = describe_collection(str(tmp_path / "data"), tmp_path / "whole", "qwenimage", batch=2)
    written = (tmp_path / "whole/written.jsonl").read_bytes()
    ends = [k + 1 for k, letter in enumerate(written) if letter == ord("\n")]
    assert len(echo.asked) == 11 and len(ends) == 12
    chance = random.Random(0)
    for cut in [0, len(written), *(chance.randrange(len(written)) for _ in range(8))]:
        out = tmp_path / f"cut-{cut}"
        out.mkdir()
        (out / "written.jsonl").write_bytes(written[:cut])
        echo.asked.clear()
        again = describe_collection(str(tmp_path / "data"), out, "qwenimage", batch=2)
        assert (again.rows, again.left_out) == (whole.rows, whole.left_out)
        lines = (out / "written.jsonl").read_bytes().splitlines()
        assert sorted(lines) == sorted(written.splitlines())  # nothing lost, nothing twice
        assert len(echo.asked) <= 12 - sum(end <= cut for end in ends) + 1
    echo.asked.clear()
    describe_collection(str(tmp_path / "data"), tmp_path / "whole", "qwenimage", batch=2, words=9)
    assert len(echo.asked) == 11  # another question


@pytest.mark.parametrize("name", WRITING)
def test_batches_write_what_single_pictures_do(tmp_path, name, monkeypatch):
    family = get_family(name)
    folder = family.tiny(tmp_path / "model", seed=0)
    write_list(tmp_path / "data", 5)
    load = type(family).load_writer

    def loaded(self, *rest):
        writer = load(self, *rest)
        torch.manual_seed(1)
        for parameter in writer.model.parameters():
            parameter.normal_(0, 1)  # so that pictures matter
        return writer

    monkeypatch.setattr(type(family), "load_writer", loaded)
    options = dict(model=str(folder), words=2, prompt="What?", device="cpu")
    made = [
        describe_collection(str(tmp_path / "data"), tmp_path / f"{n}", batch=n, **options).rows
        for n in (1, 4)
    ]
    assert made[0] == made[1] and len({str(row["captions"][0]) for row in made[0]}) > 2


def test_what_cannot_write_says_so(tmp_path):
    write_list(tmp_path / "data", 1)
    names = ", ".join(sorted(WRITING))
    with pytest.raises(ValueError, match=f"of klein cannot describe pictures; those of {names}"):
        get_family("klein").load_writer(tmp_path)
    folder = get_family("qwenimage").tiny(tmp_path / "model", seed=0)
    from safetensors.torch import load_file, save_file

    file = folder / "text_encoder/model.safetensors"
    weights = load_file(file)
    for part in ("lm_head", "visual"):
        save_file({k: v for k, v in weights.items() if part not in k}, file, dict(format="pt"))
        with pytest.raises(ValueError, match=rf"lacks .*{part}"):
            get_family("qwenimage").load_writer(folder)
    with pytest.raises(FileError, match="out: .* lies in data"):
        describe_collection(str(tmp_path / "data"), tmp_path / "data/out", str(folder))
    assert writing_model(str(folder))[0].name == "qwenimage"


def test_caption_is_a_command():
    assert packaged_notebooks()["caption"].parent.name == "papers"
