"""Find names and calls in tests that would fail only when the tests run.

Tests that are marked slow are collected in every run, but seldom run.
"""

import ast
import contextlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any


def wrong_uses(source: str, names: Mapping[str, Any]) -> list[str]:
    """Return what a module names that is not there, and calls whose arguments do not fit.

    Args:
        source: text of the module
        names: its global names, with their values
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known = {name: value for name, value in names.items() if name not in local}
    found = []
    for node in nodes:
        found += [f"line {node.lineno}: {why}" for why in _wrong(node, known)]
    return found


def _wrong(node: ast.AST, known: Mapping[str, Any]) -> Iterator[str]:
    """Return what is wrong with one node of the syntax tree."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = known.get(node.value.id)
        read = isinstance(owner, ModuleType) and isinstance(node.ctx, ast.Load)
        if read and not hasattr(owner, node.attr):
            yield f"{owner.__name__} has no {node.attr}"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sciftune"):
        for name in node.names:
            if not _can_import(node.module, name.name):
                yield f"{node.module} has no {name.name}"
    elif isinstance(node, ast.Call) and (why := _misfit(node, known)):
        yield why


def _can_import(module: str, name: str) -> bool:
    """Return True if a module has a name or a submodule."""
    with contextlib.suppress(ImportError):
        owner = importlib.import_module(module)
        return hasattr(owner, name) or bool(importlib.util.find_spec(f"{module}.{name}"))
    return False


def _misfit(call: ast.Call, known: Mapping[str, Any]) -> str:
    """Return why the arguments of a call do not fit its function; '' if they do."""
    function = _called(call.func, known)
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    if not inspect.isfunction(function) or starred or any(k.arg is None for k in call.keywords):
        return ""
    try:
        inspect.signature(function).bind(*call.args, **{k.arg: k for k in call.keywords})
    except TypeError as error:
        return f"{function.__name__}: {error}"
    return ""


def _called(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the object that is called, if it is a global name or one of a module."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = known.get(node.value.id)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None
