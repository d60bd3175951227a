"""Every bad input of the table is refused with its one sentence, which the page repeats."""

import os

import pytest
from additions import added
from refusals import CASES, PAGE, scene, sentence

from sciftune.core.recipe import RecipeError, resolve
from sciftune.core.recipe_fields import Fields

HOSTILE = [True, -1, 0, 10**30, -(10**30), 1.5, float("nan"), float("inf"), b"abc", object()]
HOSTILE += ["", " ", "abc", "a\nb", "a\0b", "\ud800", "../x", "图" * 50, "x" * 100_000, "1e400"]
HOSTILE += ["a:1,b:nan", ":", ",", "a|b", "0x10", "{}", "https://[", "a" * 5000 + "://b"]
HOSTILE += [[], [1], [None], [["x"]], {}, dict(a=1), (), lambda: 0]
BASES = {
    "flow": dict(),
    "adapters": dict(lora_rank=4),
    "distillation": dict(model="sd15", objective="dmd2"),
    "sharded": dict(strategy="zero3", num_processes=2),
}
for more in added("BASES"):
    BASES |= more


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


def some_values(name, base):
    """Every value for the first base; of another every fourth, another fourth for each field."""
    if base == next(iter(BASES)) or os.environ.get("SCIFTUNE_SLOW"):
        return HOSTILE
    return HOSTILE[(list(Fields.model_fields).index(name) + list(BASES).index(base)) % 4 :: 4]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", Fields.model_fields)
def test_a_field_takes_a_value_or_says_its_name(name, base):
    """Whatever is given: a recipe that can be written down, or a short sentence."""
    for value in some_values(name, base):
        try:
            recipe = resolve(**BASES[base] | {name: value})
        except RecipeError as error:
            said = str(error)
            assert name in said and len(said) < 1000 and "\0" not in said, (value, said)
        else:
            assert recipe.yaml().encode(), value
