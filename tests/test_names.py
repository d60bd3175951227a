"""What `import sciftune` shows and gives, in a fresh process each."""

import ast
from pathlib import Path

import sciftune

PACKAGE = Path(sciftune.__file__).parent


def test_dir_shows_names_and_packages_without_torch(python):
    code = """
import sys, sciftune
names = dir(sciftune)
for name in names:
    if name in ("get_family", "plan", "train"):  # they compute
        continue
    assert getattr(sciftune, name) is not None, name
print(*names)
assert "torch" not in sys.modules
"""
    r = python("-c", code)
    assert r.returncode == 0, r.stderr
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(r.stdout.split()) == {*sciftune.__all__, *packages, "__version__"}
    assert not {"Callable", "Path", "logging", "sys"} & set(dir(sciftune))
    for name in sciftune.__all__:
        assert getattr(sciftune, name).__doc__, name


def test_a_wrong_name_is_an_attribute_error(python):
    r = python("-c", "import sciftune; sciftune.lanch")
    assert "AttributeError: module 'sciftune' has no attribute 'lanch'" in r.stderr
    r = python("-c", "from sciftune import lanch")
    assert "ImportError: cannot import name 'lanch' from 'sciftune'" in r.stderr


def test_editors_are_told_the_same_names():
    """Type checkers read the imports under TYPE_CHECKING, a process the table of modules."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    said = {
        node.module: tuple(alias.name for alias in node.names)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
    }
    assert said == sciftune._MODULES
    assert sorted(name for names in said.values() for name in names) == sciftune.__all__


def test_every_package_has_a_docstring():
    files = sorted(PACKAGE.rglob("__init__.py"))
    assert len(files) > 15
    for path in files:
        assert ast.get_docstring(ast.parse(path.read_text())), path
