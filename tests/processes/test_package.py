"""The wheel, and the generated files."""

import os
import shutil
import zipfile


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
    here = {str(p.relative_to(root)) for p in (root / "sciftune").rglob("*.py")} | {
        "sciftune/lab/launch.ipynb"
    }
    here |= {str(p.relative_to(root)) for p in (root / "sciftune/assets").rglob("*") if p.is_file()}
    assert len(here) > 60 and any(
        n.endswith("nano/klein/transformer/diffusion_pytorch_model.safetensors") for n in here
    )
    assert here <= {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*")}
    code = (
        "import sciftune.lab.launch as l, sys; print(l.__file__); print(l.launch_notebook_path())"
    )
    r = python("-c", code, cwd=tmp_path / "site", env={"PYTHONPATH": str(tmp_path / "site")})
    assert r.stdout.split() == [
        str(tmp_path / "site/sciftune/lab/launch.py"),
        str(tmp_path / "site/sciftune/lab/launch.ipynb"),
    ], r.stderr


def test_launch_notebook_works_from_the_wheel_alone(python, root, tmp_path):
    shutil.copytree(
        root / "sciftune", tmp_path / "site/sciftune", ignore=shutil.ignore_patterns("__pycache__")
    )
    work = tmp_path / "work"
    work.mkdir()
    r = python(
        "-m",
        "papermill",
        tmp_path / "site/sciftune/lab/launch.ipynb",
        "out.ipynb",
        "-p",
        "launcher",
        "print",
        "-p",
        "name",
        "w",
        "--no-progress-bar",
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert r.returncode == 0 and (work / "runs/w/command.txt").exists(), r.stderr
