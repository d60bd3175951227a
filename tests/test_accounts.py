"""Every reader accounts for all files of a collection, wherever it lies."""

import inspect
import io
import json
import tarfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sciftune.core.registry import records
from sciftune.data import pairs, readers, shards, sources
from sciftune.data import parquet as parquets
from sciftune.data.images import DataError
from sciftune.data.pairs import find_pairs
from sciftune.data.sources import find_source, open_collection


def png(shade=0):
    data = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 0, 0)).save(data, "PNG")
    return data.getvalue()


def folder(root):
    for i in range(3):
        (root / f"{i}.png").write_bytes(png(i))
        (root / f"{i}.txt").write_text(f"{i}")


def listed(root):
    (root / "a.png").write_bytes(png())
    (root / "metadata.jsonl").write_text(json.dumps(dict(file_name="a.png", text="x")))


def parquet(root):
    columns = dict(image=[png(0), png(1)], text=["x", "y"])
    pq.write_table(pa.table(columns), root / "a.parquet")


def tar(root):
    with tarfile.open(root / "a.tar", "w") as file:
        for name, data in {"0.png": png(), "0.txt": b"x"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


def hugging_face(root):
    datasets = pytest.importorskip("datasets")
    columns = dict(image=[dict(bytes=png(), path=None)], text=["x"])
    datasets.Dataset.from_dict(columns).save_to_disk(str(root))


def pair_list(root):
    for i in range(2):
        (root / f"{i}.png").write_bytes(png(i))
    pair = dict(jpg_0="0.png", jpg_1="1.png", label_0=1, label_1=0, caption="x")
    (root / "metadata.jsonl").write_text(json.dumps(pair))


def pair_parquet(root):
    row = dict(jpg_0=[png(0)], jpg_1=[png(1)], label_0=[1.0], label_1=[0.0], caption=["x"])
    pq.write_table(pa.table(row), root / "a.parquet")


def coco(root):
    (root / "train2017").mkdir()
    (root / "train2017/0.jpg").write_bytes(png())
    images, notes = [dict(id=7, file_name="0.jpg")], [dict(image_id=7, caption="x")]
    (root / "annotations").mkdir()
    file = root / "annotations/captions_train2017.json"
    file.write_text(json.dumps(dict(images=images, annotations=notes)))


CASES = dict(  # name -> what writes the collection, record and class of its reader
    folder=(folder, "folder", readers.Files),
    list=(listed, "list", readers.Files),
    parquet=(parquet, "parquet", parquets.Parquet),
    tar=(tar, "tar", shards.Tars),
    hugging_face=(hugging_face, "huggingface", parquets.HuggingFace),
    coco=(coco, "coco", readers.Files),
    pair_list=(pair_list, None, readers.Files),
    pair_parquet=(pair_parquet, None, pairs.PairParquet),
    remote_parquet=(parquet, "parquet", parquets.RemoteParquet),
    remote_tar=(tar, "tar", shards.Tars),
)
OTHER = {"notes.doc": b"?", "sub/old.doc": b"?", ".hidden": b"?", "sub/lone.heic": b"?"}


def counts(line):
    """Count the files in an account, those that are read and the others."""
    used, _, left = line.partition("; not read: ")

    def total(text):
        return sum(int(word) for word in text.replace("(", " ").split() if word.isdigit())

    return total(used.partition(": ")[2]), total(left.replace("sub/", ""))


@pytest.mark.parametrize("name", CASES)
def test_an_account_names_every_file(tmp_path, name):
    write, _, kind = CASES[name]
    root = tmp_path / "data"
    root.mkdir()
    write(root)
    read = sum(1 for p in root.rglob("*") if p.is_file())
    for other, data in OTHER.items():
        (root / other).parent.mkdir(exist_ok=True)
        (root / other).write_bytes(data)
    place = root
    if name.startswith("remote"):
        memory = fsspec.filesystem("memory")
        memory.put(str(root), f"/accounts-{name}", recursive=True)
        place = f"memory://accounts-{name}"
    find = find_pairs if name.startswith("pair") else find_source
    opened = open_collection(place, find=find)
    assert isinstance(opened.source, kind)
    (line,) = [note for note in opened.notes if note.startswith("files of")]
    assert counts(line) == (read, len(OTHER)), line
    assert ".hidden" in line and "lone.heic" in line


def test_every_reader_has_a_case():
    assert {record for _, record, _ in CASES.values()} - {None} == set(records("readers"))
    remote = {record for name, (_, record, _) in CASES.items() if name.startswith("remote")}
    assert remote == {name for name, record in records("readers").items() if record.shards}
    modules = (readers, parquets, shards, pairs)
    classes = {
        c for m in modules for _, c in inspect.getmembers(m, inspect.isclass) if "chunks" in dir(c)
    }
    tested = {kind for _, _, kind in CASES.values()}
    assert classes <= tested, "give the new source a case"


def test_a_reader_is_removed_with_its_module(tmp_path, monkeypatch):
    coco(tmp_path)
    found = records("readers")
    assert open_collection(tmp_path).ids == ["train2017/0.jpg"]
    others = {name: record for name, record in found.items() if name != "coco"}
    monkeypatch.setattr(sources, "records", lambda kind: others)
    with pytest.raises(DataError, match="1 images and not one caption"):
        open_collection(tmp_path)


def test_an_address_of_one_shard_has_no_account(tmp_path):
    tar(tmp_path)
    fsspec.filesystem("memory").put(str(tmp_path / "a.tar"), "/one/a.tar")
    notes = open_collection("memory://one/a.tar").notes
    assert not [note for note in notes if note.startswith("files of")]
