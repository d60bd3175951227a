"""The wheel, and the generated files."""

import configparser
import email
import importlib.util
import os
import re
import shutil
import tomllib
import zipfile

import yaml

from sciftune import __version__
from sciftune.core.recipe import Recipe


def test_wheel_holds_everything(python, root, tmp_path):
    shutil.copytree(
        root,
        tmp_path / "source",
        ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__"),
    )  # a build writes into its source
    r = python(
        "-c",
        "from setuptools.build_meta import build_wheel; print(build_wheel('..'))",
        cwd=tmp_path / "source",
    )
    assert r.returncode == 0, r.stderr
    (wheel,) = tmp_path.glob("sciftune-*.whl")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(tmp_path / "site")
    here = {
        str(p.relative_to(root))
        for kind in ("*.py", "*.ipynb")
        for p in (root / "sciftune").rglob(kind)
    }
    assert {"sciftune/lab/launch.ipynb", "sciftune/project/bench.ipynb"} <= here
    here = {name for name in here if not name.startswith("sciftune/project/")}
    here |= {str(p.relative_to(root)) for p in (root / "sciftune/assets").rglob("*") if p.is_file()}
    assert len(here) > 60 and any(
        n.endswith("nano/klein/transformer/diffusion_pytorch_model.safetensors") for n in here
    )
    packed = {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*")}
    assert here <= packed
    assert not [name for name in packed if "sciftune/project" in name]
    (programs,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert "sciftune = sciftune.lab.command:program" in programs.read_text()
    assert (tmp_path / "site/sciftune/py.typed").exists()  # type checkers read its annotations
    (metadata,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    said = email.message_from_string(metadata.read_text())
    assert said["Version"] == __version__ and said["License-Expression"] == "Apache-2.0"
    assert said["Author-email"] and "Typing :: Typed" in said.get_all("Classifier")
    assert said.get_payload() == (root / "README.md").read_text()
    code = (
        "import sciftune.lab.command as c, sys; print(c.__file__); print(c.launch_notebook_path())"
    )
    r = python("-c", code, cwd=tmp_path / "site", env={"PYTHONPATH": str(tmp_path / "site")})
    assert r.stdout.split() == [
        str(tmp_path / "site/sciftune/lab/command.py"),
        str(tmp_path / "site/sciftune/lab/launch.ipynb"),
    ], r.stderr


def test_one_version_everywhere(root):
    settings = configparser.ConfigParser()
    settings.read(root / "settings.ini")
    newest = re.search(r"^## (\d\S*)", (root / "CHANGELOG.md").read_text(), re.M)
    cited = yaml.safe_load((root / "CITATION.cff").read_text())["version"]
    everywhere = {settings["DEFAULT"]["version"], newest[1], cited, __version__}
    assert len(everywhere) == 1, everywhere


def test_the_command_works_from_the_wheel_alone(python, root, tmp_path):
    left_out = shutil.ignore_patterns("__pycache__", "project")
    shutil.copytree(root / "sciftune", tmp_path / "site/sciftune", ignore=left_out)
    work = tmp_path / "work"
    work.mkdir()

    def sciftune(*words):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        return python("-m", "sciftune.lab.command", *words, cwd=work, env=environment)

    assert sciftune("--version").stdout == f"sciftune {__version__}\n"
    given = ("run", "launcher=print", "-p", "name", "w")
    r = sciftune(*given)
    assert r.returncode == 0 and (work / "runs/w/command.txt").exists(), r.stderr
    assert [path.name for path in (work / "runs").iterdir() if path.name != "w"] == []
    r = sciftune(*given, "stepz=3")
    assert r.returncode == 1 and r.stdout == "", r.stdout
    assert r.stderr == "sciftune run: unknown parameter 'stepz' (did you mean 'steps'?)\n"


def test_help_lists_every_field_without_torch(python):
    code = """
import sys
from sciftune.lab.command import call_command
call_command(["run", "--help"])
print(sorted({"torch", "matplotlib", "papermill"} & sys.modules.keys()))
"""
    r = python("-c", code)
    assert r.returncode == 0 and r.stdout.endswith("[]\n"), r.stderr
    listed = {line.split()[0] for line in r.stdout.splitlines() if line.startswith("  ")}
    assert Recipe.model_fields.keys() <= listed


def test_the_planner_does_without_triton(python):
    blocked = "import sys; sys.modules['triton'] = None\n"
    code = "from sciftune.planner.search import engine_variants; print(len(engine_variants(2)))"
    r = python("-c", blocked + code)
    assert r.returncode == 0, r.stderr
    assert int(r.stdout.split()[-1]) > 10


def test_windows_is_told_what_to_use(python):
    done = python("-c", "import sys; sys.platform = 'win32'; import sciftune")
    assert done.returncode == 1 and "on Windows run it in WSL 2" in done.stderr.splitlines()[-1]


def test_what_is_used_by_private_names_is_pinned(root):
    """Another version may have other ones; torch has an upper bound, too."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    words = " ".join([*project["dependencies"], *extras["flash"]])
    for name in ("flashoptim", r"flash-attn-4\[cu13\]"):
        assert re.search(rf"\b{name}==\d", words), name
    assert re.search(r"\btorch>=2\.\d+,<2\.\d+", words)


def test_threads_that_wait_use_no_processor(python):
    code = (
        "import sciftune, time, torch; torch.set_num_threads(2); a = torch.ones(1_000_000)\n"
        "a.mul_(1.0); began = time.process_time()\n"
        "for _ in range(50):\n    a.mul_(1.0); time.sleep(0.02)\n"
        "print(time.process_time() - began)"
    )
    settings = {n: v for n, v in os.environ.items() if n not in ("OMP_WAIT_POLICY",)}
    waited = python("-c", code, env=settings)
    assert float(waited.stdout) < 0.15, waited.stdout + waited.stderr  # 0.01; spinning 0.5 to 0.8


def test_imports_of_pipelines_warn_of_nothing(python):
    code = "import sciftune; from transformers import CLIPImageProcessor"
    engine = "; import deepspeed" if importlib.util.find_spec("deepspeed") else ""
    r = python("-c", code + engine)
    assert r.returncode == 0 and r.stdout + r.stderr == "", r.stdout + r.stderr
