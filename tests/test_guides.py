"""The commands that README and the guides show are ones that a user can give."""

import re
import shlex
from pathlib import Path

import pytest

from sciftune.lab.command import commands, settings_of
from sciftune.lab.launch import LaunchError, recipe_from

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/guides").glob("*.md")),
    ROOT / "docs/measured.md",
]


def shown_commands():
    "(page, words of a command) of every line of code that calls sciftune or scripts/run."
    for page in PAGES:
        for line in page.read_text().splitlines():
            if found := re.match(r"    (?:sciftune +|scripts/(?=run))(\w+.*)", line):
                yield pytest.param(
                    shlex.split(found[1], comments=True), id=f"{page.stem}: {found[1]}"
                )


SHOWN = list(shown_commands())


def test_there_are_commands():
    assert len(SHOWN) > 20


@pytest.mark.parametrize("words", SHOWN)
def test_a_shown_command_is_accepted(words, monkeypatch):
    name, *rest = words
    assert name in commands()
    if name in ("run", "plan", "prove"):
        recipe_from(settings_of(rest))


def test_a_wrong_one_would_be_found():
    with pytest.raises(LaunchError, match="lora_rank"):
        recipe_from(settings_of(["lora_rnk=3"]))
