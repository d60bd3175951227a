"""Captions by a text encoder: in order, each once, the same whatever was killed or batched."""

import contextlib
import functools
import io
import json
import os
import random
import tarfile
from types import SimpleNamespace

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
    folder.mkdir(parents=True)
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

    error = None

    identity = "echo"

    def __init__(self):
        self.asked = []

    def write(self, pictures, prompts, system, longest):
        if self.error:
            raise self.error
        if any(max(p.size) > 9 * min(p.size) for p in pictures):
            raise ValueError("too long")
        self.asked += prompts if longest > 1 else []
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
    assert len(echo.asked) == 11 and len(ends) == 11
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
        assert len(echo.asked) <= 11 - sum(end <= cut for end in ends) + 2
    echo.asked.clear()
    describe_collection(str(tmp_path / "data"), tmp_path / "whole", "qwenimage", batch=2, words=9)
    assert len(echo.asked) == 11  # another question


def test_refused_pictures_are_asked_about_again(tmp_path, echo):
    "What is not about a picture ends the call."
    write_list(tmp_path / "data", 6)
    (tmp_path / "data/5.png").write_bytes(png(5, (200, 4)))
    call = functools.partial(describe_collection, str(tmp_path / "data"), model="qwenimage")
    made = call(tmp_path / "out", batch=1)
    assert len(made.left_out) == 1
    echo.write = lambda pictures, *rest: ["now"] * len(pictures)
    again = call(tmp_path / "out", batch=1)
    assert again.left_out == [] and (tmp_path / "out/quarantine.jsonl").read_text() == ""
    assert [row["captions"][0] for row in again.rows].count("now") == 1
    del echo.write
    for error, said in (
        (ValueError("no such class"), "model: describes no picture at all: no such class"),
        (OSError("disk is full"), "disk is full"),
    ):
        echo.error = error
        with pytest.raises(
            (FileError, OSError), match=said
        ) as kept:  # holds the frames of the call
            call(tmp_path / "other")
        assert not (tmp_path / "other/quarantine.jsonl").exists()
    echo.error = None
    assert kept and len(call(tmp_path / "other").rows) == 5  # the lock was released by the errors


def test_lines_without_a_caption_are_no_answers(tmp_path):
    lines = [dict(key="a", reason="no memory"), [1], {}, 3, dict(key="b", caption="c")]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "written.jsonl").write_text(text)
    with contextlib.closing(module.Journal(tmp_path / "written.jsonl")) as journal:
        assert list(journal.answers) == ["b"]


def test_a_picture_that_vanishes_ends_the_call(tmp_path, echo, monkeypatch):
    write_list(tmp_path / "data", 3)
    opened = module._opened

    def vanishing(*args):
        collection = opened(*args)
        (tmp_path / "data/1.png").unlink(missing_ok=True)
        return collection

    monkeypatch.setattr(module, "_opened", vanishing)
    with pytest.raises(FileError, match="data: metadata.jsonl:2: was readable"):
        describe_collection(str(tmp_path / "data"), tmp_path / "out", "qwenimage")
    made = describe_collection(str(tmp_path / "data"), tmp_path / "out", "qwenimage")
    assert [row["id"] for row in made.rows] == ["0.png", "2.png"]


def test_out_is_a_folder_of_its_own(tmp_path):
    write_list(tmp_path / "a/data", 2)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    data = str(tmp_path / "a/data")
    before = (tmp_path / "a/data/metadata.jsonl").read_text()
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/other.jsonl").write_text(before)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/metadata.jsonl").write_text("")
    for args, said in (
        ((data, None, tmp_path / "link"), "out: data, .* lies in"),
        ((f"{data}/metadata.jsonl", None, tmp_path / "link/data"), "out: data, .* lies in"),
        ((data, str(tmp_path / "lists/other.jsonl"), tmp_path / "lists"), "out: metadata, "),
        ((data, None, tmp_path / "full"), "holds a metadata.jsonl of others"),
    ):
        with pytest.raises(FileError, match=said):
            module._opened(*args)
    assert len(module._opened(f"{data}/metadata.jsonl", None, tmp_path / "out")) == 2


def test_linked_pictures_and_masks_of_equal_pictures_are_stored_whole(tmp_path, echo):
    (tmp_path / "data/store").mkdir(parents=True)
    (tmp_path / "data/store/real").write_bytes(png(0, (60, 90)))
    lines = []
    for name, side in (("a", 200), ("b", 100)):
        (tmp_path / f"data/{name}.png").symlink_to("store/real")
        Image.new("L", (60, 90), side).save(tmp_path / f"data/{name}-mask.png")
        lines.append(dict(file_name=f"{name}.png", caption=name, mask=f"{name}-mask.png"))
    (tmp_path / "data/metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    made = describe_collection(str(tmp_path / "data"), out, "qwenimage")
    stored = [out / row["file_name"] for row in made.rows]
    assert all(not p.is_symlink() and p.samefile(tmp_path / "data/store/real") for p in stored)
    new = open_collection(out, areas=("mask",))
    masks = [(tmp_path / f"data/{name}-mask.png").read_bytes() for name in "ab"]
    assert [new.mask(0), new.mask(1)] == masks
    stored[0].unlink()
    stored[0].symlink_to("nowhere")  # as earlier versions made them
    describe_collection(str(tmp_path / "data"), out, "qwenimage")
    assert stored[0].read_bytes() == png(0, (60, 90))


def test_stored_pictures_are_listed_once(tmp_path, echo, monkeypatch):
    listed = []
    for name in ("listdir", "scandir"):
        plain = getattr(os, name)
        note = lambda path=".", plain=plain: listed.append(str(path)) or plain(path)  # noqa: E731
        monkeypatch.setattr(os, name, note)
    write_list(tmp_path / "data", 9)
    describe_collection(str(tmp_path / "data"), tmp_path / "out", "qwenimage")
    assert listed.count(str(tmp_path / "out/images")) == 1


def test_a_lock_that_fails_otherwise_says_so(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        module.Journal(tmp_path / "written.jsonl")


def test_progress_counts_the_pictures_that_were_asked_about(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    told = []
    with contextlib.closing(module.Journal(tmp_path / "written.jsonl")) as journal:
        journal.add([dict(key=f"other {k}", caption="x") for k in range(5)])
        ask = functools.partial(map, str)
        module._answer_all(ask, iter([[0, 1], [2]]), list("abc"), journal, told.append)
    assert [line.split(" described")[0] for line in told] == ["2 of 3", "3 of 3"]


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
