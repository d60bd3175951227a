"""What people have in their folders: odd and broken images, lines, columns and shards.

Each through the collection that training opens.
"""

import io
import json
import struct
import tarfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sciftune.core.recipe import resolve
from sciftune.data.images import DataError, pixels
from sciftune.data.sources import open_collection
from sciftune.lab.look import quick_look


def encoded(image, format="PNG", **kw):
    b = io.BytesIO()
    image.save(b, format, **kw)
    return b.getvalue()


def png(width, height, depth, kind, rows):
    "A PNG of a bit depth that Pillow does not write."

    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def half(first, second, size=(8, 16)):
    im = Image.new("RGB", size, first)
    im.paste(second, (0, 0, size[0], size[1] // 2))
    return im  # `second` above


turned = Image.Exif()
turned[0x0112] = 6  # shown a quarter clockwise: what was above is at the right
RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)
ODD = {  # file -> (bytes, size as shown, {(row, column) of 64 x 64: colour})
    "one_pixel.png": (encoded(Image.new("RGB", (1, 1), (9, 8, 7))), (1, 1), {(32, 32): (9, 8, 7)}),
    "wide.jpg": (
        encoded(Image.new("L", (20_000, 500), 77), "JPEG"),
        (20_000, 500),
        {(32, 32): (77,) * 3},
    ),
    "tall.png": (encoded(Image.new("1", (100, 20_000), 1)), (100, 20_000), {(32, 32): WHITE}),
    "cmyk.jpg": (
        encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"),
        (16, 16),
        {(32, 32): (254, 0, 0)},
    ),
    "cmyk.tif": (
        encoded(Image.new("CMYK", (9, 9), (0, 0, 0, 0)), "TIFF"),
        (9, 9),
        {(32, 32): WHITE},
    ),
    "grey16.png": (
        encoded(Image.fromarray(np.full((9, 9), 32896, np.uint16))),
        (9, 9),
        {(32, 32): (128,) * 3},
    ),
    "rgb16.png": (
        png(4, 4, 16, 2, (b"\0" + np.full(12, 32896, ">u2").tobytes()) * 4),
        (4, 4),
        {(32, 32): (128,) * 3},
    ),
    "clear16.png": (
        png(4, 4, 16, 6, (b"\0" + np.tile(np.array([65535, 0, 0, 0], ">u2"), 4).tobytes()) * 4),
        (4, 4),
        {(32, 32): WHITE},
    ),
    "animated.gif": (
        encoded(
            Image.new("RGB", (8, 8), RED),
            "GIF",
            save_all=True,
            append_images=[Image.new("RGB", (8, 8), GREEN)],
        ),
        (8, 8),
        {(32, 32): RED},
    ),
    "animated.webp": (
        encoded(
            Image.new("RGB", (8, 8), RED),
            "WEBP",
            save_all=True,
            append_images=[Image.new("RGB", (8, 8), GREEN)],
            lossless=True,
        ),
        (8, 8),
        {(32, 32): RED},
    ),
    "turned.png": (
        encoded(half(RED, GREEN), exif=turned),
        (16, 8),
        {(32, 2): RED, (32, 61): GREEN},
    ),
    "turned.jpg": (
        encoded(half(RED, GREEN, (800, 1600)), "JPEG", exif=turned),
        (1600, 800),
        {(32, 2): (254, 0, 0), (32, 61): (0, 255, 1)},
    ),
    "clear.png": (encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 0))), (8, 8), {(32, 32): WHITE}),
    "half_clear.png": (
        encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 128))),
        (8, 8),
        {(32, 32): (255, 127, 127)},
    ),
}
BROKEN = {
    "cut.png": (
        encoded(
            Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
        )[:3000],
        "unreadable image",
    ),
    "text.png": (b"not an image", "unreadable image"),
    "empty.png": (b"", "no bytes"),
    "huge.png": (png(20_000, 20_000, 8, 2, b""), "too many pixels: 20000x20000"),
}


def test_odd_images_are_what_they_show_and_broken_ones_are_set_aside(tmp_path):
    for name, (data, *_) in (ODD | BROKEN).items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).with_suffix(".txt").write_text(name)
    c = open_collection(tmp_path, max_bad_fraction=0.3, quarantine=tmp_path.parent / "q.jsonl")
    assert set(c.ids) == set(ODD) and {
        r["source"]: BROKEN[r["source"]][1] in r["reason"] for r in c.rejected
    } == dict.fromkeys(BROKEN, True)
    for s in c:
        _, size, colours = ODD[s.id]
        assert (s.width, s.height) == size, s.id
        seen = pixels(s.image, 64, 64)
        for at, colour in colours.items():
            assert np.abs(seen[at].astype(int) - colour).max() <= 2, (s.id, at, seen[at])
    with pytest.raises(DataError, match="4 of 18 rows"):
        open_collection(tmp_path)


@pytest.fixture
def good():
    return [encoded(Image.new("RGB", (16 + i, 16), (i, 0, 0))) for i in range(8)]


def test_a_list_with_bad_lines(tmp_path, good):
    for i, b in enumerate(good):
        (tmp_path / f"{i}.png").write_bytes(b)

    def line(i, path):
        return json.dumps(dict(file_name=path, text=f"figure {i}"))

    (tmp_path / "metadata.jsonl").write_text(
        "\n".join(
            [
                line(0, "0.png"),
                '{"file_name": "1.png", "text": ',
                line(2, str(tmp_path / "2.png")),
                line(3, "../3.png"),
                line(4, "/etc/passwd"),
                '{"file_name": "5.png"}',
                line(6, "6.png"),
                line(7, "7.png"),
            ]
        )
    )
    c = open_collection(tmp_path, max_bad_fraction=0.5)
    assert c.ids == ["0.png", "2.png", "6.png", "7.png"] and [r["source"] for r in c.rejected] == [
        f"metadata.jsonl:{n}" for n in (2, 4, 5, 6)
    ]
    assert [r["reason"].split(":")[0] for r in c.rejected] == [
        "bad JSON line",
        "path outside the data root",
        "path outside the data root",
        "empty caption",
    ]


def test_a_parquet_without_a_column_and_one_cut_short(tmp_path, good):
    pq.write_table(pa.table(dict(image=good)), tmp_path / "a.parquet")
    with pytest.raises(
        DataError,
        match="8 images and not one caption .a.parquet row 0: no caption column among image: "
        "expected one of caption",
    ):
        open_collection(tmp_path)
    pq.write_table(pa.table(dict(text=["x"])), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet: no image column among text"):
        open_collection(tmp_path)
    pq.write_table(pa.table(dict(image=good, text=["x"] * 8)), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="a.parquet: not a readable parquet file"):
        open_collection(tmp_path)


def test_a_look_at_shards_reads_headers(tmp_path, good):
    pq.write_table(pa.table(dict(image=good, text=["x"] * 8)), tmp_path / "a.parquet")
    look = quick_look(resolve(data=str(tmp_path), run_root=str(tmp_path / "runs")))
    assert (look.rows, look.looked_at, look.whole) == (8, 8, False)
    assert look.shapes[0] == (16, 16)


def test_a_tar_with_a_broken_member_and_one_cut_short(tmp_path, good):
    for name in ("0.tar", "1.tar"):
        with tarfile.open(tmp_path / name, "w") as t:
            for i, b in enumerate(good):
                for member, data in (
                    (f"{i}.png", b[:40] if i == 3 else b),
                    (f"{i}.txt", f"figure {i}".encode()),
                ):
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    t.addfile(info, io.BytesIO(data))
    c = open_collection(tmp_path, max_bad_fraction=0.3)
    assert [r["source"] for r in c.rejected] == ["0.tar:3", "1.tar:3"]
    whole = (tmp_path / "1.tar").read_bytes()
    for size, why in (
        (5 * 1024 + 515, "ends in the middle of 2.txt"),  # a piece of a caption
        (5 * 1024 + 512, "ends in the middle of 2.txt"),
        (6 * 1024, "ends without the empty block"),  # between two members
    ):
        (tmp_path / "1.tar").write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"1.tar: {why}.*; copy the shard again"):
            open_collection(tmp_path, max_bad_fraction=0.9)
