"""The gate's own checks, on modules that are wrong on purpose."""

import gate
import pytest

OWN = """
import os

class Row:
    def __init__(self):
        self._width = 1

def _half(row):
    os._exit(row._replace(_width=row._width).__class__)
"""


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("storage._cdata", "_cdata"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from accelerate import _x as y", "accelerate._x"),
        ("getattr(state, '_scales', None)", "_scales"),
        ("hasattr(state, '_scales')", "_scales"),
        ("self._conv_forward(x)", "_conv_forward"),
    ],
)
def test_private_names_of_other_packages_are_refused(tmp_path, monkeypatch, code, name):
    monkeypatch.setattr(gate, "PACKAGE", tmp_path)
    monkeypatch.setattr(gate, "modules", lambda: [*map(gate.Module, tmp_path.glob("*.py"))])
    (tmp_path / "rows.py").write_text(OWN)
    assert list(gate.private_parts()) == []
    (tmp_path / "user.py").write_text(f"from sciftune.rows import _half\n{code}\nrow._width\n")
    (problem,) = gate.private_parts()
    assert problem.startswith(f"sciftune/user.py:2 uses {name}, private to another package")
    monkeypatch.setattr(gate, "PRIVATE_PARTS", ("user",))
    assert list(gate.private_parts()) == []


@pytest.mark.parametrize(
    ("docstring", "problems"),
    [
        ("Return the width of a row.", 0),
        ("The width of a row.", 1),
        ("Return the width.\n\n    Args:\n        row: of the table\n    ", 1),
        ("Whether there is a row.", 2),
    ],
)
def test_docstrings_that_say_not_what_is_returned_are_refused(
    tmp_path, monkeypatch, docstring, problems
):
    monkeypatch.setattr(gate, "PACKAGE", tmp_path)
    monkeypatch.setattr(gate, "modules", lambda: [*map(gate.Module, tmp_path.glob("*.py"))])
    code = f'class Row:\n    @property\n    def width(self):\n        """{docstring}"""\n'
    (tmp_path / "rows.py").write_text(code)
    assert len(list(gate.unplain_docstrings())) == problems
