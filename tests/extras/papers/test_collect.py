"""Damaged documents cost themselves and nothing else; documents of two calls are read once."""

import gzip
import json
import random
import tarfile

import pytest

pytest.importorskip("pypdfium2", reason="pip install 'sciftune[papers]'")
pytest.importorskip("resvg_py")

from sciftune.extras.papers import made
from sciftune.extras.papers.collect import collect, find_documents, read_apart, read_document
from sciftune.lab.command import packaged_notebooks

MUTATED = 200


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers") / "papers"
    made.write_documents(folder)
    with tarfile.open(folder / "2401.00001", "w:gz") as archive:
        archive.add(folder / "source", "source")
    (folder / "page.html").write_text('<img src="a.svg" alt="Dose and rate in time">')
    (folder / "a.svg").write_bytes(made.plotted("svg", ("Dose", "Rate", "x")))
    return folder


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Cut, doubled, overwritten, or with bits turned."""
    data, at = bytearray(data), chance.randrange(len(data))
    kind = chance.randrange(4)
    if kind == 0:
        return bytes(data[:at])
    if kind == 1:
        return bytes(data[:at] + data[at // 2 :])
    if kind == 2:
        data[at : at + 40] = chance.randbytes(40)
    for _ in range(3 if kind == 3 else 0):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def test_damaged_documents_are_left_out_with_a_reason(papers, tmp_path):
    chance, outcomes = random.Random(0), []
    sources = [s for s in find_documents([papers])[0] if s.path.is_file()]
    for number in range(MUTATED):
        source = sources[number % len(sources)]
        folder = tmp_path / f"{number}"
        folder.mkdir()
        place = folder / source.path.name
        data = source.path.read_bytes()
        if source.kind == "tar" and number % 2:  # inside of the compression
            place.write_bytes(gzip.compress(mutated(gzip.decompress(data), chance), 1))
        else:
            place.write_bytes(mutated(data, chance))
        for other in papers.glob("*.svg"):
            if not (folder / other.name).exists():
                (folder / other.name).write_bytes(other.read_bytes())
        changed = type(source)(source.name, place, folder, source.kind)
        document = read_document(changed, 128, panels=True)
        assert all(reason and "\n" not in place for place, reason in document.left_out)
        outcomes.append(bool(document.figures))
    assert 10 < sum(outcomes) < MUTATED - 10  # some are whole enough, some are not


def test_two_calls_give_the_same_and_read_once(papers, tmp_path):
    (papers / "again.pdf").write_bytes((papers / "paper.pdf").read_bytes())
    first = collect([papers], tmp_path / "out", side=256)
    reasons = {row["source"]: row["reason"] for row in first.left_out}
    assert reasons["paper.pdf"] == "the same bytes as again.pdf"
    # the tar holds the figures of the folder: they stay once, and the list says of which
    assert any("the same picture as" in reason for reason in reasons.values())
    assert len({row["file_name"] for row in first.rows}) == len(first.rows) == 5
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.png")}
    second = collect([papers], tmp_path / "out", side=256)
    assert (second.rows, second.left_out) == (first.rows, first.left_out)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.png")}
    lines = (tmp_path / "out/metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["document"] for line in lines] == [r["document"] for r in first.rows]


def test_a_document_that_takes_too_long_is_left_out(papers, tmp_path):
    (source,) = find_documents([papers / "paper.pdf"])[0]
    assert read_apart(source, tmp_path / "x", 64, True, 0.05) == "took longer than 0.05 s"


def test_collect_is_a_command():
    assert packaged_notebooks()["collect"].parent.name == "papers"
