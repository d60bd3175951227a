"""A set-up that failed anywhere is not taken for a complete one: `scripts/setup` with a Python that
fails at each of its calls in turn."""

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[1] / "scripts/setup"
PYTHON = """#!/bin/bash
# A Python that knows what the set-up asks for. FAILS: a line per call that shall fail.
echo "$*" >> "$PLACE/calls"
number=$(wc -l < "$PLACE/calls")
grep -qx "$number" "$PLACE/fails" 2>/dev/null && exit 1
case "$*" in
  *hashlib*) sha256sum | cut -d " " -f 1 ;;
  "-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *"[dev]"*) touch "$PLACE/installed" ;;
esac
"""
CALLS = 8  # Of a first use where nothing fails


def project(place):
    "A folder with what the set-up reads, and fake Pythons before all others."
    for folder in ("scripts", "bin"):
        (place / folder).mkdir()
    shutil.copy(SETUP, place / "scripts")
    for name in ("pyproject.toml", "settings.ini"):
        (place / name).write_text("")
    (place / "scripts/use").write_text(
        'set -euo pipefail\n. "$(dirname "$0")/setup"\necho "ready: $python"\n'
    )
    for name in ("python3.11", "python3.12", "python3", "python"):
        (place / "bin" / name).write_text(PYTHON)
        (place / "bin" / name).chmod(0o755)
    return place


def use(place, fails=(), **environment):
    "A script of the project, as a person calls it; the calls with these numbers fail."
    (place / "calls").unlink(missing_ok=True)
    (place / "fails").write_text("\n".join(map(str, fails)))
    path = f"{place / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", place / "scripts/use"],
        env=dict(PATH=path, PLACE=str(place), **environment),
        capture_output=True,
        text=True,
        timeout=30,
    )


def complete(place):
    "Whether the next call would take the environment as it is."
    return (place / ".venv/.stamp").exists()


def test_a_set_up_is_made_once(tmp_path):
    place = project(tmp_path)
    done = use(place)
    assert done.returncode == 0 and done.stdout == f"ready: {place / '.venv/bin/python'}\n"
    assert complete(place) and (place / "installed").exists()
    assert len((place / "calls").read_text().splitlines()) == CALLS
    assert use(place).returncode == 0
    assert "install" not in (place / "calls").read_text()


@pytest.mark.parametrize("first", range(1, CALLS + 1))
def test_failing_from_a_step_on_ends_the_set_up_and_the_next_call_mends_it(first, tmp_path):
    place = project(tmp_path)
    failed = use(place, range(first, 40))
    assert failed.returncode == 1 and "ready" not in failed.stdout
    assert not complete(place)
    assert "run it again" in failed.stderr or "no Python 3.11" in failed.stderr
    assert use(place).returncode == 0 and complete(place) and (place / "installed").exists()


@pytest.mark.parametrize("number", range(1, CALLS + 1))
def test_one_step_that_fails_is_made_good_or_ends_the_set_up(number, tmp_path):
    place = project(tmp_path)
    done = use(place, [number])
    assert (done.returncode == 0) == complete(place)
    assert not complete(place) or (place / "installed").exists()


def test_an_environment_whose_python_is_gone_is_made_again(tmp_path):
    place = project(tmp_path)
    use(place)
    (place / ".venv/bin/python").unlink()
    assert use(place).returncode == 0 and (place / ".venv/bin/python").exists()


def test_another_torch_is_another_environment(tmp_path):
    place = project(tmp_path)
    limit = place / ".venv/constraints.txt"
    use(place)
    usual = limit.read_text()
    assert use(place, SCIFTUNE_TORCH="2.11.0").returncode == 0
    assert limit.read_text() == "torch==2.11.0\n" != usual
    assert "install" in (place / "calls").read_text()
    use(place, SCIFTUNE_TORCH="2.11.0")
    assert "install" not in (place / "calls").read_text()
    use(place)
    assert limit.read_text() == usual
