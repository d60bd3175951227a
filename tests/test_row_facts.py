"""The words and the document of a figure reach training and evaluation by every way in."""

import io
import json
import random
import tarfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sciftune.core.recipe import resolve
from sciftune.core.registry import records
from sciftune.data.cells import word_boxes
from sciftune.data.named_words import words_of, words_sentence
from sciftune.data.sources import open_collection
from sciftune.data.splits import hold_out_by_source

COUNT = 40


def png(shade):
    data = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 0, 0)).save(data, "PNG")
    return data.getvalue()


def drawn_rows(seed):
    """Rows with labels in every form, most of them of a document."""
    draw, rows = random.Random(seed), []
    for i in range(COUNT):
        texts = [f"{draw.choice(['time (s)', 'Δ', '10²'])} {k}" for k in range(draw.randrange(4))]
        boxes = [dict(text=text, box=[0, k, 9, k + 1]) for k, text in enumerate(texts)]
        labels = draw.choice([texts, "|".join(texts), json.dumps(texts), boxes])
        row = dict(caption=f"figure {i}", labels=labels, page=i, document=f"paper {i % 9}.pdf")
        rows.append({k: v for k, v in row.items() if k != "document" or i % 8})
    return rows


def write_list(root, rows):
    for i in range(COUNT):
        (root / f"{i:02}.png").write_bytes(png(i))
    lines = [json.dumps(dict(row, file_name=f"{i:02}.png")) for i, row in enumerate(rows)]
    (root / "metadata.jsonl").write_text("\n".join(lines))


def write_other_list(root, rows):
    write_list(root, rows)
    (root / "metadata.jsonl").rename(root.parent / "list.jsonl")


def write_folder(root, rows):
    for i, row in enumerate(rows):
        (root / f"{i:02}.png").write_bytes(png(i))
        (root / f"{i:02}.txt").write_text(row["caption"])
        (root / f"{i:02}.json").write_text(json.dumps(dict(row, caption="another")))


def write_tars(root, rows):
    for shard in range(2):
        with tarfile.open(root / f"{shard}.tar", "w") as tar:
            for i, row in [(i, row) for i, row in enumerate(rows) if i // 25 == shard]:
                for suffix, data in (("png", png(i)), ("json", json.dumps(row).encode())):
                    member = tarfile.TarInfo(f"{i:02}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def texts_of(row):
    """Labels in one form, which the column of a table must have."""
    return list(known.labels) if (known := words_of(row)) else []


def columns(rows):
    texts = list(map(texts_of, rows))
    names = [row.get("document") for row in rows]
    table = dict(image=[dict(bytes=png(i), path=None) for i in range(COUNT)], labels=texts)
    return table | dict(
        caption=[r["caption"] for r in rows], document=names, page=list(range(COUNT))
    )


def write_parquet(root, rows):
    table = pa.table(columns(rows))
    pq.write_table(table[:15], root / "a-0.parquet", row_group_size=4)
    pq.write_table(table[15:], root / "a-1.parquet", row_group_size=9)


def write_hugging_face(root, rows):
    pytest.importorskip("datasets").Dataset.from_dict(columns(rows)).save_to_disk(str(root))


def write_coco(root, rows):
    (root / "train2017").mkdir()
    (root / "annotations").mkdir()
    images, notes = [], []
    for i, row in enumerate(rows):
        (root / f"train2017/{i:02}.jpg").write_bytes(png(i))
        images.append({k: v for k, v in row.items() if k != "caption"})
        images[-1] |= dict(id=i, file_name=f"{i:02}.jpg")
        notes.append(dict(image_id=i, caption=row["caption"]))
    listing = root / "annotations/captions_train2017.json"
    listing.write_text(json.dumps(dict(images=images, annotations=notes)))


WAYS = dict(  # name -> what writes it, and what is opened
    list=(write_list, ""),
    metadata=(write_other_list, ""),
    folder=(write_folder, ""),
    tar=(write_tars, ""),
    tar_pattern=(write_tars, "[0-9].tar"),
    tar_remote=(write_tars, "memory"),
    parquet=(write_parquet, ""),
    parquet_pattern=(write_parquet, "a-*.parquet"),
    parquet_remote=(write_parquet, "memory"),
    huggingface=(write_hugging_face, ""),
    coco=(write_coco, ""),
)


def test_every_reader_is_a_way_in():
    assert {name.partition("_")[0] for name in WAYS} - {"metadata"} == set(records("readers"))


@pytest.mark.parametrize("way", WAYS)
def test_words_and_documents_are_read_by_every_way_in(tmp_path, way):
    write, opened = WAYS[way]
    rows, root = drawn_rows(sorted(WAYS).index(way)), tmp_path / "data"
    root.mkdir()
    write(root, rows)
    place = f"{root}/{opened}" if opened else root
    if opened == "memory":
        fsspec.filesystem("memory").put(str(root), f"/facts-{way}", recursive=True)
        place = f"memory://facts-{way}"
    options = dict(metadata=tmp_path / "list.jsonl" if way == "metadata" else None)
    plain = open_collection(place, **options)
    assert not any(plain.words) and not any(plain.facts) and not any(plain.boxes)
    asked = open_collection(place, areas=("quoted", "words", "facts"), **options)
    assert (plain.ids, plain.digests) == (asked.ids, asked.digests)
    for i, row in enumerate(rows):
        assert plain.captions[i] == (row["caption"],)
        assert plain.documents[i] == asked.documents[i] == row.get("document", "")
        assert asked.facts[i]["page"] == i and texts_of(asked.facts[i]) == texts_of(row)
        table = write in (write_parquet, write_hugging_face)
        given = dict(labels=texts_of(row)) if table else row
        assert asked.words[i] == words_sentence(given) and asked.boxes[i] == word_boxes(given)
    recipe = resolve(dict(preset="tiny", data=str(place), held_out=8))
    train, held = hold_out_by_source(recipe, plain)
    of_train, of_held = ({plain.documents[i] for i in part} - {""} for part in (train, held))
    assert len(train) + len(held) == COUNT and held and not of_train & of_held
