"""Damaged files of every kind that data come in: each is read, or set aside with its name.

python tests/test_fuzz.py 100      a hundred times as many as in the suite
"""

import csv
import functools
import io
import json
import logging
import random
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from additions import added
from PIL import Image, ImageCms, PngImagePlugin

from sciftune.core.recipe import RecipeError, resolve
from sciftune.data.captions import read_captions
from sciftune.data.duplicates import small_copies
from sciftune.data.images import DataError, examine, header_size, load_picture, pixels
from sciftune.data.pairs import find_pairs
from sciftune.data.sources import open_collection
from sciftune.lab.look import quick_look

CHECKED = added("CHECKED")  # for the containers of extras
IMAGES = 60  # damaged copies of each picture
CONTAINERS = 25  # of each list, table and archive


# What is damaged


@functools.cache
def noise(mode, side=24):
    """A picture of a mode."""
    draws = random.Random(mode)
    return Image.frombytes("RGBA", (side, side), draws.randbytes(4 * side * side)).convert(mode)


def encoded(image, kind="PNG", **options):
    b = io.BytesIO()
    image.save(b, kind, **options)
    return b.getvalue()


@functools.cache
def pictures():
    """Pictures as people have them: turned, with profile, text, palette and transparency."""
    turn, text = Image.Exif(), PngImagePlugin.PngInfo()
    turn[0x0112], turn[0x010E] = 6, "a chart"
    text.add_text("workflow", "{}" * 40, zip=True)
    text.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="8"/>')
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    beside = dict(exif=turn, icc_profile=profile)
    frames = dict(save_all=True, append_images=[noise("P")])
    palette = noise("RGB").quantize(16)
    return {
        "rgb.png": encoded(noise("RGB"), pnginfo=text, **beside),
        "alpha.png": encoded(noise("RGBA"), icc_profile=profile),
        "palette.png": encoded(palette, transparency=3, pnginfo=text),
        "grey.png": encoded(noise("L"), transparency=3),
        "deep.png": encoded(Image.frombytes("I;16", (24, 24), noise("RGBA").tobytes()[:1152])),
        "photo.jpg": encoded(noise("RGB"), "JPEG", **beside),
        "print.jpg": encoded(noise("CMYK"), "JPEG"),
        "lossy.webp": encoded(noise("RGB"), "WEBP", **beside),
        "clear.webp": encoded(noise("RGBA"), "WEBP", lossless=True),
        "scan.tif": encoded(noise("RGB"), "TIFF", **beside),
        "packed.tif": encoded(noise("L"), "TIFF", compression="tiff_lzw", exif=turn),
        "moving.gif": encoded(palette, "GIF", transparency=3, **frames),
        "new.avif": encoded(noise("RGB"), "AVIF", exif=turn),
    }


def list_records():
    """Rows of a list, with references, ids, and several captions."""
    names = list(pictures())
    return [
        dict(file_name=name, text=["a", "b"], caption="", id=f"{i}", source_image=names[i - 1])
        for i, name in enumerate(names)
    ]


def tar_bytes():
    b = io.BytesIO()
    with tarfile.open(fileobj=b, mode="w") as tar:
        for i, (name, data) in enumerate(pictures().items()):
            suffix = name.rpartition(".")[2]
            record = json.dumps(dict(caption=["x"], width=24)).encode()
            for member, content in (
                (f"{i}.{suffix}", data),
                (f"{i}.txt", b"x"),
                (f"{i}.json", record),
            ):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return b.getvalue()


def parquet_bytes(**columns):
    b = io.BytesIO()
    pq.write_table(pa.table(columns), b, row_group_size=5, compression="zstd")
    return b.getvalue()


def csv_bytes():
    b = io.StringIO()
    writer = csv.DictWriter(b, ["file_name", "text", "id"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(list_records())
    return b.getvalue().encode()


def lines(records):
    return "\n".join(json.dumps(record) for record in records).encode()


@functools.cache
def containers():
    """File name -> content."""
    data = list(pictures().values())
    count = len(data)
    structs = [dict(bytes=b, path=None) for b in data]
    found = {
        "metadata.json": json.dumps(list_records()).encode(),
        "metadata.jsonl": lines(list_records()),
        "metadata.csv": csv_bytes(),
        "a.tar": tar_bytes(),
        "a.parquet": parquet_bytes(image=data, text=[["a"]] * count, source_image=structs),
        "b.parquet": parquet_bytes(image=structs, caption=["a"] * count, id=range(count)),
        "pairs.jsonl": lines(
            dict(chosen="rgb.png", rejected="grey.png", caption="x") for _ in data
        ),
        "pairs.parquet": parquet_bytes(
            jpg_0=data,
            jpg_1=data[::-1],
            label_0=[1] * count,
            label_1=[0] * count,
            caption=["x"] * count,
        ),
        "prompts.txt": b"a\nb\xe2\x80\xa8c\n",
        "prompts.jsonl": lines(["a", dict(text="b")]),
    }
    for more in added("CONTAINERS"):
        found |= more(data, lines, parquet_bytes)
    return found


# What happens to it


def damaged(data, draws):
    """A copy with bytes that were flipped, lost, doubled, zeroed, or exchanged for odd ones."""
    hurt = bytearray(data)
    for _ in range(draws.choice((1, 1, 2, 5, 20))):
        at = draws.randrange(max(len(hurt), 1))
        size = draws.choice((1, 1, 1, 2, 4, 16, 300))
        kind = draws.randrange(7)
        piece = bytes(hurt[at : at + size])
        hurt[at : at + size] = (
            draws.randbytes(len(piece)),
            bytes(b ^ 1 << draws.randrange(8) for b in piece),
            b"",
            piece * 2,
            bytes(len(piece)),
            b"\xff" * len(piece),
            draws.choice(
                (b"[" * 5000, b'"', b"{", b"\\ud800", b"null", b"1e999", b"\0", b"\xe2\x80\xa8")
            ),
        )[kind]
    return bytes(hurt[: draws.randrange(len(hurt) + 1)] if draws.random() < 0.1 else hurt)


def outcome(read, *arguments):
    """What reading gives; None where it is refused, in one sentence."""
    try:
        return read(*arguments)
    except (DataError, RecipeError) as error:
        assert str(error) and "Traceback" not in str(error)
        return None


def check_picture(data):
    """Whatever passes the check is read everywhere, in one size; nothing raises another error."""
    checked = outcome(examine, data, 10_000_000)
    shown = outcome(header_size, data)
    if not checked:
        return False
    size = checked[:2]
    assert shown == size
    assert load_picture(data).size == size
    assert pixels(data, 8, 16).shape == (8, 16, 3)
    assert small_copies(data).shape == (2, 32, 32, 3)
    return True


def check_collection(path, find=None):
    """All rows are read, or set aside with their names; what is kept can be decoded."""
    options = dict(find=find) if find else {}
    found = outcome(
        functools.partial(open_collection, max_bad_fraction=1, workers=1, **options), path
    )
    if not find:
        recipe = resolve(data=str(path), run_root=str(path.parent / "runs"), max_bad_fraction=1)
        outcome(quick_look, recipe)
    if found is None:
        return False
    assert all(row["source"] and row["reason"] for row in found.rejected)
    for number, sample in enumerate(found):
        assert pixels(sample.image, 8, 8).shape == (8, 8, 3) and sample.captions
        for k in range(len(found.references[number])):
            load_picture(found.reference(number, k))
    return True


def check_container(path):
    if "pairs" in path.name:
        return check_collection(path, find_pairs)
    for check in CHECKED:
        if (good := check(path, outcome)) is not None:
            return good
    if "prompts" in path.name:
        return bool(outcome(read_captions, path))
    return check_collection(path)


@pytest.fixture(scope="module", autouse=True)
def silence():
    """Pillow talks about damaged files."""
    level, logger = logging.getLogger("PIL").level, logging.getLogger("PIL")
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def hurt_pictures(name, count, start=0):
    """How many of so many damaged copies could be read."""
    good = 0
    for seed in range(start, start + count):
        try:
            good += check_picture(damaged(pictures()[name], random.Random(f"{name} {seed}")))
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {error!r}") from error
    return good


def hurt_containers(name, count, folder, start=0):
    for file, data in pictures().items():
        (folder / file).write_bytes(data)
    good, path = 0, folder / name
    for seed in range(start, start + count):
        path.write_bytes(damaged(containers()[name], random.Random(f"{name} {seed}")))
        try:
            good += check_container(path)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {error!r}") from error
    return good


@pytest.mark.parametrize("name", pictures())
def test_a_damaged_picture_is_read_or_named(name):
    assert check_picture(pictures()[name])
    hurt_pictures(name, IMAGES)


@pytest.mark.parametrize("name", containers())
def test_a_damaged_list_or_archive_is_read_or_named(name, tmp_path):
    for file, data in pictures().items():
        (tmp_path / file).write_bytes(data)
    (tmp_path / name).write_bytes(containers()[name])
    assert check_container(tmp_path / name)
    hurt_containers(name, CONTAINERS, tmp_path)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for name in pictures():
        print(name, hurt_pictures(name, times * IMAGES), "of", times * IMAGES, "read", flush=True)
    for name in containers():
        with tempfile.TemporaryDirectory() as place:
            good = hurt_containers(name, times * CONTAINERS, Path(place))
        print(name, good, "of", times * CONTAINERS, "read in part", flush=True)
