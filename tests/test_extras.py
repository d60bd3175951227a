"""An extra can be taken away: nothing outside names it."""

import ast
import subprocess

import additions
import pytest
import without

from sciftune.core.registry import records


@pytest.mark.slow
@pytest.mark.parametrize("extra", without.EXTRAS)
def test_what_is_left_passes_the_quick_checks(extra):
    assert without.check(extra) == 0


def test_a_copy_is_tested_by_the_quick_checks_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SCIFTUNE_SLOW", "1")
    assert without.run(tmp_path, "printenv", "SCIFTUNE_PYTHON", stdout=subprocess.DEVNULL) == 0
    assert without.run(tmp_path, "printenv", "SCIFTUNE_SLOW", stdout=subprocess.DEVNULL) == 1


@pytest.mark.parametrize("extra", without.EXTRAS)
def test_a_copy_has_nothing_of_the_extra(extra, tmp_path, python):
    root = without.copied(extra, tmp_path)
    assert (root / "sciftune/core/registry.py").is_file() and not list(
        root.rglob(f"extras/{extra}")
    )
    kinds = ("collections", "scores", "rewards", "objectives", "models")
    code = "import sys; from sciftune.core.registry import records; print([r.module for kind in "
    code += f"{kinds} for r in records(kind).values()])"
    done = python("-c", code, cwd=root, env={"PYTHONPATH": str(root)})
    left = {module for module in ast.literal_eval(done.stdout)}
    here = {record.module for kind in kinds for record in records(kind).values()}
    own = {module for module in here if module.startswith(f"sciftune.extras.{extra}.")}
    assert own or extra in ("kernels", "papers")  # those have kernels, and a command
    assert left == here - own


def test_tables_of_extras_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(additions, "FOLDER", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/additions.py").write_text("CASES = [1, 2]")
    assert additions.added("CASES") == [[1, 2]] and additions.added("OTHERS") == []
