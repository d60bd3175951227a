"""`help()` says what the notebooks say of each parameter."""

import contextlib
import importlib
import inspect
import io
import pkgutil
from pathlib import Path

import docstrings
import pytest
from fastcore.docments import docments

import sciftune


def shown(thing):
    "What `help(thing)` prints, with single spaces."
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        help(thing)
    return " ".join(said.getvalue().split())


def exported():
    "Module and name of every function and class that a notebook exports."
    for found in pkgutil.walk_packages(sciftune.__path__, "sciftune."):
        module = importlib.import_module(found.name)
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            own = getattr(thing, "__module__", "") == module.__name__
            if own and (inspect.isfunction(thing) or inspect.isclass(thing)):
                yield found.name, name, thing


def comments(thing):
    "Parameter, or 'return' -> what fastcore reads in its comment."
    try:
        found = docments(thing)
    except (OSError, TypeError, SyntaxError):
        return {}
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize(
    "place, expected",
    [
        ("lab.live.watch", ["every: Seconds between two looks", "every: float = 2.0"]),
        ("training.validation.save_image", ["image: (3,H,W) in [-1,1]; values outside"]),
        ("training.intervals.range_names", ["Returns: '0-0.2' and so on"]),
        ("strategies.engine.Engine", ["plan: What was left to the planner"]),
        ("lab.scores.Evaluation", ["series: Curve that the row is a point of"]),
    ],
)
def test_help_has_meaning_and_type(place, expected):
    module, _, name = place.rpartition(".")
    thing = getattr(importlib.import_module(f"sciftune.{module}"), name)
    for text in expected:
        assert text in shown(thing)


def test_every_documented_parameter_is_in_help():
    missing, seen = [], 0
    for module, name, thing in exported():
        if inspect.isclass(thing) or not inspect.isfunction(inspect.unwrap(thing)):
            continue
        said = " ".join((thing.__doc__ or "").split())
        for parameter, text in comments(thing).items():
            seen += 1
            words = " ".join(docstrings.comment_text(str(text)).split())
            if words not in said:
                missing.append(f"{module}.{name}: {parameter}: {words}")
    assert seen > 1500
    assert not missing


def test_only_the_generated_parts_are_added():
    for path in Path(sciftune.__file__).parent.rglob("*.py"):
        if path.name not in ("__init__.py", "_modidx.py"):
            text = path.read_text()
            bare = docstrings.hand_written(text)
            assert docstrings.documented(bare) == text == docstrings.documented(text)


SOURCE = '''
class Room:
    """A room."""

    def __init__(
        self,
        width: float,  # Metres
    ):
        self.width = width


def area(
    width: float,  # Metres
    *more: float,  # Metres, r"\\d"
) -> float:  # Square metres
    """The area.

    Raises ValueError for none.
    """


def _own(
    x: int,  # Not shown
):
    """Own."""
'''


def test_the_parts_of_a_docstring():
    made = docstrings.documented(SOURCE)
    names = {}
    exec(made, names)
    assert inspect.getdoc(names["Room"]) == "A room.\n\nArgs:\n    width: Metres"
    lines = inspect.getdoc(names["area"]).splitlines()
    assert lines[2:6] == ["Raises ValueError for none.", "", "Args:", "    width: Metres"]
    assert lines[6:] == [r'    *more: Metres, r"\d"', "", "Returns:", "    Square metres"]
    assert inspect.getdoc(names["_own"]) == "Own."
    assert docstrings.hand_written(made) == SOURCE
