"""Every bad input of the table is refused with its one sentence, which the page repeats."""

import pytest
from refusals import CASES, PAGE, scene, sentence


@pytest.fixture(scope="module")
def folder():
    """What the cases find on the disk."""
    with scene() as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=[f"{c.topic}: {c.wrong}"[:60] for c in CASES])
def test_is_refused_with_a_sentence(case, folder):
    said = sentence(case, folder)
    assert case.says in said and "Traceback" not in said, said


def test_the_page_has_every_case():
    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) - text.count("| given | said |") == len(CASES), (
        "python tests/tools/refusals.py"
    )
    for case in CASES:
        row = next(line for line in rows if line.startswith(f"| {case.wrong} |"))
        assert case.says in row, f"python tests/tools/refusals.py: {row}"
