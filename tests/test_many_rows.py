"""Collections as they were before their rows became bytes and arrays, and what a row costs."""

import hashlib
import io
import json
import os
import random
import struct
import tarfile
import tracemalloc
import zlib
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sciftune.data.buckets import BucketOrder
from sciftune.data.images import DataError
from sciftune.data.pairs import BothImages, find_pairs
from sciftune.data.parquet import Parquet
from sciftune.data.readers import NamesInside, inside, json_rows
from sciftune.data.sources import open_collection, open_collections


def png(width, height, shade):
    """A grey PNG whose bytes are the same with every version of zlib."""

    def chunk(name, data):
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = (b"\0" + bytes([shade]) * width) * height
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows, 0))
        + chunk(b"IEND", b"")
    )


def picture(i):
    return png(8 + i % 5, 8 + i % 3, i % 250)


def written(folder, files):
    """Write files below a folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def odd_folder(folder):
    """Images with captions beside them, some under odd names, and some that cannot be used."""
    files = {f"a/{i}.png": picture(i) for i in range(40)}
    files |= {f"a/{i}.txt": f"chart {i}".encode() for i in range(38)}
    files |= {f"a-b/{i}.png": picture(i) for i in range(40, 50)}
    files |= {f"a-b/{i}.json": json.dumps(dict(text=["x", f"{i}"])).encode() for i in range(40, 50)}
    files |= {"a.b/z.PNG": picture(60), "a.b/z.TXT": b"upper", "e\u0301.png": picture(61)}
    files |= {"\u00e9.caption": "für é".encode(), "b.png": picture(62), "b.txt": b"edit"}
    files |= {"b.source2.png": picture(63), "b.source1.png": picture(64), "c.heic": b"?"}
    files |= {"c.txt": b"c", "d.png": b"broken", "d.txt": b"d", "e.png": picture(65)}
    files |= {"e.txt": b"caf\xe9", "z.TXT": b"first", "z.txt": b"second", "z.png": picture(66)}
    files |= {"d.pdf": b"?", "README.md": b"?", ".hidden/a.png": picture(1), "e.jpg": b"?"}
    written(folder, files)
    (folder / "link.png").symlink_to("b.png")
    (folder / "link.txt").symlink_to("b.txt")
    (folder.parent / "secret.png").write_bytes(picture(0))
    (folder / "out.png").symlink_to("../secret.png")


def odd_list(folder):
    """A list with absolute and unusual paths, repeated ids, references and bad lines."""
    written(folder, {f"img/{i}.png": picture(i) for i in range(60)})
    (folder / "link.png").symlink_to("img/3.png")
    names = [f"img/{i}.png" for i in range(50)]
    names += [f"./img//{i}.png" for i in range(50, 55)] + [
        f"{folder}/img/{i}.png" for i in (55, 56)
    ]
    names += ["link.png", "img/../img/57.png", "../secret.png", "img/gone.png", "img", "", None, 7]
    lines = [dict(file_name=name, text=f"chart {i}") for i, name in enumerate(names)]
    lines[3] |= dict(id=3, source="img/58.png")
    lines[4] |= dict(id="3", source="img/59.png")
    lines[5] |= dict(text=["", "zwei", "Größe"], source="img/58.png")
    lines[6] |= dict(text=" ", prompt="in another key", source="img/59.png")
    lines[7] |= dict(text="\ud800", source="img/1.png")
    lines[8] |= dict(source="img/gone.png")
    texts = [*map(json.dumps, lines), "{broken", "[1]", "", json.dumps(lines[0])]
    (folder / "metadata.jsonl").write_text("\n".join(texts))


def odd_shards(folder):
    """Parquet with and without ids, with lists of captions, empty cells and references."""
    for shard in range(3):
        rows = range(30 * shard, 30 * shard + 30)
        columns = dict(image=[picture(i) for i in rows], text=[[f"{i}", "x"] for i in rows])
        columns["text"][7] = None
        columns["image"][8] = b"broken"
        if shard == 1:
            columns["id"] = [f"figure {i}" if i % 9 else None for i in rows]
            columns["source_image"] = [picture(i + 1) if i % 2 else None for i in rows]
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), folder / f"{shard}.parquet", row_group_size=7)


def odd_tars(folder):
    """Tar shards, some members of which are no part of a sample."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i in range(30):
            parts = {f"{i}.png": picture(i), f"{i}.txt": f"chart {i}".encode()}
            parts |= {f"{i}.source.png": picture(i + 1)} if i % 3 == 0 else {"._x": b"?"}
            for name, data in parts.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def odd_pairs(folder):
    """Pairs in a list, with a tie and a pair that is not there."""
    written(folder, {f"{i}.png": picture(i) for i in range(20)})
    pairs = [dict(jpg_0=f"{i}.png", jpg_1=f"{i + 1}.png", caption=f"{i}") for i in range(18)]
    for i, pair in enumerate(pairs):
        pair |= dict(label_0=i % 3, label_1=1)
    pairs[0] = dict(chosen="gone.png", rejected="1.png", caption="x")
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def content(collection, root):
    """Everything that a run takes from a collection, as one digest."""
    sizes = [list(map(list, collection.sizes))]
    order = BucketOrder(sizes, 2, 4, seed=3)
    parts = [list(collection.ids), list(map(list, collection.captions)), sizes]
    parts += [list(collection.digests), list(collection.shards), collection.rejected]
    parts += [[[r.digest for r in rows] for rows in collection.references]]
    parts += [[m.tolist() for e in range(2) for m in order.epoch(e)], collection.fingerprint]
    text = json.dumps(parts).replace(str(root), "ROOT")
    return len(collection), hashlib.sha256(text.encode()).hexdigest()[:16]


MADE = dict(folder=odd_folder, list=odd_list, shards=odd_shards, tars=odd_tars, pairs=odd_pairs)
BEFORE = dict(  # Samples and `content` by the last commit that kept rows as Python objects
    folder=(53, "2fa2bcb09e90cd5b"),
    list=(56, "34db4d374d690758"),
    shards=(84, "728b17efba2caac0"),
    tars=(30, "05e81370748083b7"),
    pairs=(11, "d4bde3672ff08bd3"),
    joined=(140, "a9a0af9983c2c5a1"),
)


@pytest.fixture(scope="module")
def collections(tmp_path_factory):
    root = tmp_path_factory.mktemp("data").resolve()
    for name, make in MADE.items():
        (root / name).mkdir() if name not in ("shards", "tars") else None
        make(root / name)
    return root


def opened(root, name, **options):
    options |= dict(max_bad_fraction=0.9, workers=2)
    if name == "joined":
        return open_collections([root / "shards", root / "list"], **options)
    find = dict(find=find_pairs) if name == "pairs" else {}
    return open_collection(root / name, **options, **find)


@pytest.mark.parametrize("name", [*MADE, "joined"])
def test_a_collection_is_what_it_was(collections, name, tmp_path):
    for _ in range(2):  # verified, and by what the first one has found
        found = opened(collections, name, cache=tmp_path)
        assert content(found, collections) == BEFORE[name]
    if name == "pairs":
        both = BothImages(found)
        digests = [hashlib.sha256(both[i].image).hexdigest() for i in range(2 * len(both))]
        assert both.digests == digests


def counted_calls(monkeypatch):
    """Count what is asked of the file system by names of files."""
    counts = Counter()

    def count(name, call):
        def counting(*a, **kw):
            counts[name] += 1
            return call(*a, **kw)

        return counting

    for name in ("stat", "lstat", "scandir", "listdir", "readlink"):
        monkeypatch.setattr(os, name, count(name, getattr(os, name)))
    return counts


@pytest.mark.parametrize("absolute", [False, True])
def test_a_list_asks_by_folder_and_not_by_row(tmp_path, monkeypatch, absolute):
    root = tmp_path.resolve()
    written(root, {f"{i % 4}/{i}.png": b"x" for i in range(200)})
    names = [f"{root}/" * absolute + f"{i % 4}/{i % 200}.png" for i in range(20_000)]
    lines = (json.dumps(dict(file_name=name, id=i, text="x")) for i, name in enumerate(names))
    (root / "a.jsonl").write_text("\n".join(lines))
    counts = counted_calls(monkeypatch)
    rows = json_rows(root, root / "a.jsonl")
    assert (len(rows), any(row.fault for row in rows)) == (20_000, False)
    assert counts["scandir"] == 4 and counts.total() < 1000  # a file is asked for by 4 or more


def test_a_folder_is_walked_once_and_images_are_asked_for_once(tmp_path, monkeypatch):
    root = tmp_path.resolve() / "data"
    written(root, {f"{i % 4}/{i}.png": picture(i) for i in range(400)})
    written(root, {f"{i % 4}/{i}.txt": b"x" for i in range(400)})
    open_collection(root, cache=tmp_path / "cache")
    counts = counted_calls(monkeypatch)
    assert len(open_collection(root, cache=tmp_path / "cache")) == 400
    assert counts["scandir"] == 5
    assert counts.total() < 3.5 * 400  # a caption's size and kind, and the stamp of the image


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_is_few_bytes(tmp_path, kind):
    root, count = tmp_path.resolve(), 20_000
    if kind == "parquet":
        texts = dict(text=[f"a line chart of number {i}" for i in range(count)])
        pq.write_table(pa.table(dict(image=[b"x"] * count, **texts)), root / "a.parquet")
    else:
        (root / "a.png").write_bytes(b"x")
        line = json.dumps(dict(file_name="a.png", text="a line chart of some number"))
        (root / "a.jsonl").write_text(f"{line}\n" * count)
    tracemalloc.start()
    try:
        if kind == "parquet":
            rows = Parquet(root, [root / "a.parquet"]).rows
        else:
            rows = json_rows(root, root / "a.jsonl")
        kept, most = (size / count for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert len(rows) == count
    assert kept < 150 and most < 300, (kept, most)


def any_name(draw, root):
    """A path as lists have them: of files, links and folders, by usual and unusual ways."""
    parts = [draw.choice(["a", "b", "in", "out", "größe", "gro\u0308ße", "..", ".", "", "no"])]
    parts += [draw.choice(["sub", ".", "..", "", "in"])] * draw.randrange(2)
    leaf = draw.choice(["0.png", "1.png", "in.png", "out.png", "é.png", "e\u0301.png", "no.png"])
    start = draw.choice(["", "", "", f"{root}/", f"{root.parent}/alias/", "/", "./"])
    odd = draw.choice([None, 7, "", " ", "/", "a/", "\ud800/0.png", "a\0b/0.png", "sub"])
    name = start + "/".join([*parts[: draw.randrange(3)], leaf])
    return odd if draw.random() < 0.05 else name


@pytest.mark.parametrize("seed", range(4))
def test_many_names_are_checked_as_one_is(tmp_path, seed):
    draw = random.Random(seed)
    root = tmp_path.resolve() / "root"
    leaves = ("0.png", "é.png") if seed % 2 else ("0.png", "e\u0301.png")
    for folder in ("", "a/", "a/sub/", "b/", "größe/" if seed < 2 else "gro\u0308ße/"):
        written(root, {f"{folder}{leaf}": b"x" for leaf in leaves})
        (root / folder / "in.png").symlink_to(root / "0.png")
        (root / folder / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "secret.png").write_bytes(b"x")
    written(tmp_path, {"elsewhere/0.png": b"x"})
    (root / "in").symlink_to("a")
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "alias").symlink_to(root)
    find = NamesInside(root)

    def said(check, *a):
        try:
            return check(*a)
        except DataError as e:
            return f"refused: {e}"

    names = [any_name(draw, root) for _ in range(4000)]
    found = [said(find, name) for name in names]
    assert found == [said(inside, root, name) for name in names]
    assert len({name for name in found if "refused" not in name}) > 10
    assert sum(bool(files) for _, files in find.plain.values()) > 5
