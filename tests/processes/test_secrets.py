"""A token in the address of the data: what a run leaves has nothing of it.

A renewed token continues the run.
"""

import io
import tarfile
from pathlib import Path

import fsspec
import pytest
from forked import log, losses, start, wait
from PIL import Image

from sciftune.core.recipe import Recipe, RecipeError, resolve
from sciftune.core.rundir import RunDir
from sciftune.core.secrets import secrets_file
from sciftune.lab.prepare import keep_run_secrets
from sciftune.lab.report import run_report

SHARD = "vault://host/set.tar"
TINY = {
    "cpu": True,
    "steps": 2,
    "held_out": 4,
    "micro_batch": 2,
    "global_batch": 4,
    "validation_steps": 2,
    "validation_images": 1,
    "validation_sample_steps": 2,
    "lr_schedule": "constant",
    "strategy": "ddp",
    "num_processes": 2,
}


class Vault(fsspec.AbstractFileSystem):
    """One file behind a token, which an error quotes."""

    protocol = "vault"
    valid: set = set()
    content = b""

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def _check(self, path):
        if path.partition("?token=")[2] not in self.valid:
            raise PermissionError(f"403 Forbidden: {path}")

    def exists(self, path, **options):
        self._check(path)
        return True

    def isdir(self, path):
        return False

    def ukey(self, path):
        return path

    def _open(self, path, mode="rb", **options):
        self._check(path)
        return io.BytesIO(self.content)

    def cat_file(self, path, start=None, end=None, **options):
        self._check(path)
        return self.content[start:end]


@pytest.fixture
def vault():
    fsspec.register_implementation("vault", Vault, clobber=True)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(16):
            png = io.BytesIO()
            Image.new("RGB", (64, 64), (number, 0, 9 * number)).save(png, "PNG")
            for name, data in ((f"{number}.png", png.getvalue()), (f"{number}.txt", b"a square")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    Vault.content, Vault.valid = out.getvalue(), {"first-token"}
    return Vault


def traces(folder, *secrets):
    "Files below `folder` in which one of the secrets stands."
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [p for p in found if any(s.encode() in p.read_bytes() for s in secrets)]


def test_a_token_leaves_no_trace_and_may_be_renewed(tmp_path, monkeypatch, vault):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "runs"
    run = RunDir(folder / "token")

    def trained(token, **fields):
        address = f"{SHARD}?token={token}"
        recipe = resolve(data=address, run_root=str(folder), name="token", **TINY | fields)
        run.path.mkdir(parents=True, exist_ok=True)
        keep_run_secrets(run, recipe)
        recipe.save(run.recipe)
        return wait(start(run, Recipe.load(run.recipe)))

    assert trained("first-token") == [0, 0], log(run)
    run_report(run)
    assert secrets_file(run.path).stat().st_mode & 0o777 == 0o600
    assert b"first-token" in secrets_file(run.path).read_bytes()

    assert any(trained("wrong-token", resume="latest", steps=3))
    assert "403 Forbidden: vault://host/set.tar?token=***" in log(run)

    vault.valid = {"renewed-token"}
    (run.path / "log_0.txt").unlink()
    assert trained("renewed-token", resume="latest", steps=4) == [0, 0], log(run)
    assert sorted(losses(run.read_metrics())) == [1, 2, 3, 4]
    assert traces(folder, "first-token", "wrong-token", "renewed-token") == []
    assert [p.parent.name for p in traces(tmp_path, "renewed-token")] == ["secrets"]
    assert "vault://host/set.tar?token=***" in run.recipe.read_text()


def test_an_address_that_nobody_knows_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = RunDir(tmp_path / "unknown")
    run.path.mkdir()
    recipe = resolve(data="vault://host/other.tar?token=***")
    with pytest.raises(Exception, match="give the whole address once more, as data="):
        keep_run_secrets(run, recipe)
    with pytest.raises(RecipeError) as refused:
        resolve(data="vault://host/a.tar?token=secret-one:x,/b:0.5")
    assert "secret-one" not in str(refused.value)
