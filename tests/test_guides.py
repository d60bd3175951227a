"""The commands that README, the guides and the notebooks show are ones that a user can give."""

import json
import re
import shlex
from pathlib import Path

import pytest

from sciftune.core.rate_groups import group_numbers, rate_groups
from sciftune.lab.command import commands, planned_recipe, settings_of
from sciftune.lab.jobs import LaunchError
from sciftune.lab.prepare import recipe_from
from sciftune.models.family import get_family

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "nbs").rglob("*.ipynb"))
COMMAND = r"(?:sciftune +|scripts/(?=run))"
SETTINGS = r"(\w+ +(?:-\w|\w+=)[^`\n]*)"
SHOWN_AS = (  # indented, in a fence, and within a line
    re.compile(rf"^    {COMMAND}(\w+[^\n]*)", re.M),
    re.compile(rf"^{COMMAND}{SETTINGS}", re.M),
    re.compile(rf"`{COMMAND}{SETTINGS}`"),
)
PLACEHOLDER = re.compile(r"\.\.\.|…|[<\[]|(?<![\": ]){|[A-Z]{3,}|mymodel")


def prose(page):
    """What a page says; of a notebook the cells that are no code."""
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def shown_commands(removed=False):
    """(name, settings) of every command that a page shows whole, each once.

    Pages about extras that were taken away are read only with `removed`.
    """
    found = {}
    for page in PAGES:
        text = prose(page)
        extras = re.search(r"<!-- extra: ([\w, ]+) -->", text)
        needed = extras[1].split(", ") if extras else []
        if not removed and not all((ROOT / "sciftune/extras" / name).is_dir() for name in needed):
            continue
        for line in (line for shape in SHOWN_AS for line in shape.findall(text)):
            if not PLACEHOLDER.search(line.partition("#")[0]):
                found.setdefault(line, pytest.param(shlex.split(line, comments=True), id=line))
    return found.values()


SHOWN = list(shown_commands())


def test_there_are_commands():
    assert len(SHOWN) > 20


@pytest.mark.parametrize("words", SHOWN)
def test_a_shown_command_is_accepted(words, monkeypatch):
    name, *rest = words
    assert name in commands()
    while "-f" in rest:  # a file of a run that is not here
        at = rest.index("-f")
        rest = rest[:at] + rest[at + 2 :]
    if name == "plan":
        planned_recipe(rest)
    elif name in ("run", "verify-resume"):
        recipe_from(settings_of(rest))


def test_groups_that_are_shown_match_parameters():
    shown = [p.values[0][1:] for p in shown_commands(removed=True) if "lr_groups" in p.id]
    recipes = [recipe_from(settings_of(words)) for words in shown]
    assert recipes
    for recipe in recipes:
        family = get_family(recipe.model)
        net = getattr(family.build_tiny(**family.tiny_variants), family.denoiser_component)
        group_numbers(rate_groups(recipe.lr_groups), [name for name, _ in net.named_parameters()])


def test_a_wrong_one_would_be_found():
    with pytest.raises(LaunchError, match="lora_rank"):
        recipe_from(settings_of(["lora_rnk=3"]))
