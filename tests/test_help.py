"""`help()` says what a parameter means, and names no parameter that does not exist."""

import ast
import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest
import yaml

import sciftune
from sciftune.core.recipe import Recipe

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def shown(thing):
    "Return what `help(thing)` prints, with single spaces."
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        help(thing)
    return " ".join(page.getvalue().split())


@pytest.mark.parametrize(
    "place, expected",
    [
        ("lab.live.watch", ["every: ", "every: float = 2.0"]),
        ("training.validation.save_image", ["image: (3,H,W) in [-1,1]"]),
        ("training.intervals.range_names", ["Returns: "]),
        ("strategies.engine.Engine", ["plan: "]),
        ("lab.scores.Evaluation", ["series: "]),
    ],
)
def test_help_has_meaning_and_type(place, expected):
    module, _, name = place.rpartition(".")
    thing = getattr(importlib.import_module(f"sciftune.{module}"), name)
    for text in expected:
        assert text in shown(thing)


def test_every_field_has_a_meaning_and_every_meaning_a_field():
    "Also of objectives and extras, whose sentences are in files of their own."
    fields = Recipe.model_fields
    assert [name for name, info in fields.items() if not info.description] == []
    files = list(Path(sciftune.__file__).parent.rglob("fields.yaml"))
    assert len(files) > 1
    for file in files:
        assert set(yaml.safe_load(file.read_text())) <= set(fields), file


def documented(docstring, section):
    "Return the names that a Google section of a docstring documents."
    part = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", docstring or "", re.M)
    return set(re.findall(r"^    \*{0,2}(\w+)(?: \(.*?\))?:", part[1], re.M)) if part else set()


def parameters(function):
    "Return the names of a function's parameters."
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return {one.arg for one in every if one}


def unknown_names(tree):
    "Yield the name of a definition and what its docstring documents without having it."
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            if wrong := documented(ast.get_docstring(node), "Args") - parameters(node):
                yield node.name, wrong
        elif isinstance(node, ast.ClassDef):
            makers = [n for n in node.body if isinstance(n, FUNCTIONS) and n.name == "__init__"]
            fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
            taken = set(fields).union(*(parameters(maker) for maker in makers))
            if wrong := documented(ast.get_docstring(node), "Args") - taken:
                yield node.name, wrong


MODULES = sorted(Path(sciftune.__file__).parent.rglob("*.py"))


def test_docstrings_name_only_parameters_that_exist():
    trees = {path: ast.parse(path.read_text()) for path in MODULES if path.name != "_modidx.py"}
    wrong = [(path.name, *found) for path, tree in trees.items() for found in unknown_names(tree)]
    assert not wrong
    count = sum(
        len(documented(ast.get_docstring(node), "Args"))
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef))
    )
    assert count > 1000


def test_an_unknown_name_is_found():
    tree = ast.parse(
        'def area(side):\n    """Return it.\n\n    Args:\n        size: of it\n    """\n'
    )
    assert list(unknown_names(tree)) == [("area", {"size"})]
