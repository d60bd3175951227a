"""JupyterLab in a real headless browser opens launch.ipynb, runs all cells and shows the plots.

Skipped, with its reason, where no browser is installed.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sciftune.lab.launch import free_port

pytestmark = pytest.mark.browser
CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SMALL = dict(
    preset="tiny",
    steps=6,
    figures=32,
    held_out=4,
    validation_steps=3,
    validation_images=2,
    validation_sample_steps=2,
    checkpoint_steps=0,
    name="in-lab",
)
PATIENCE = 1800  # seconds: so long that only a page or a server that hangs needs them
ERRORS = [
    '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]',
    '.jp-RenderedText[data-mime-type="application/vnd.jupyter.stderr"] >> text=Error',
]


@pytest.fixture
def lab(python, root, tmp_path):
    "A JupyterLab that serves a folder with launch.ipynb, small parameters filled in by papermill."
    r = python(
        "-m",
        "papermill",
        root / "nbs/launch.ipynb",
        tmp_path / "launch.ipynb",
        "--prepare-only",
        "--no-progress-bar",
        *(x for k, v in SMALL.items() for x in ("-p", k, str(v))),
    )
    assert r.returncode == 0, r.stderr
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--ServerApp.port={port}",
        "--IdentityProvider.token=secret",
        f"--ServerApp.root_dir={tmp_path}",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    environment = os.environ | {"JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    with open(tmp_path / "lab.log", "w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment)
    try:
        while not listens(port):
            assert server.poll() is None, (tmp_path / "lab.log").read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab/tree/launch.ipynb?token=secret"
    finally:
        server.terminate()
        server.wait(PATIENCE)


def listens(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(
    CHROMIUM is None, reason="no browser on this machine (Debian: apt-get install chromium)"
)
def test_all_cells_run_in_the_browser(lab, tmp_path):
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright in this environment (pip install playwright)"
    )
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=dict(width=1100, height=6500))
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_selector("text=report.html")
        errors = page.locator(", ".join(ERRORS)).count()
        pictures = page.locator(".jp-OutputArea-output img").count()
        text = page.locator(".jp-Notebook").inner_text()
        picture = Path(os.environ.get("SCIFTUNE_SCREENSHOT", tmp_path / "lab.png"))
        page.screenshot(path=str(picture))
        browser.close()
    assert errors == 0 and pictures >= 8 and "step 6/6" in text and picture.stat().st_size > 50_000
    assert (tmp_path / "runs/in-lab/report.html").exists()
