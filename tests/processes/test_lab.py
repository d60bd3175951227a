"""In a real headless browser: JupyterLab runs launch.ipynb, whose view grows while the job runs,
and the page of the run at two widths, light and dark.

Skipped, with its reason, where no browser is installed.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.lab.jobs import free_port
from sciftune.lab.report_page import write_page

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
STEPS = 300  # some 0.1 s each: the view, which looks every two seconds, sees many of them
SMALL = dict(
    preset="tiny",
    steps=STEPS,
    figures=32,
    held_out=4,
    validation_steps=STEPS // 2,
    validation_images=2,
    validation_sample_steps=2,
    checkpoint_steps=0,
    name="in-lab",
)
PATIENCE = 1800  # seconds: so long that only a page or a server that hangs needs them
ERROR = '.jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]'
QUIET = dict(fetchNews="false", checkForUpdates=False)  # no question over the notebook's corner
NO_BROWSER = "no browser on this machine (Debian: apt-get install chromium)"
NO_PLAYWRIGHT = "no playwright in this environment (pip install playwright)"


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
    ]
    settings = tmp_path / "config/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(QUIET))
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


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_all_cells_run_in_the_browser(lab, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason=NO_PLAYWRIGHT)
    shots = Path(os.environ.get("SCIFTUNE_SCREENSHOTS", tmp_path))
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=dict(width=1100, height=6500))
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(lab)
        wait(page, IDLE)
        run_all_cells(page, playwright.TimeoutError)
        first = watched_step(page, 1, shots / "live-1.png")
        second = watched_step(page, first[0] + 10, shots / "live-2.png")
        wait(page, FINISHED)
        page.screenshot(path=str(shots / "lab.png"))
        errors = page.locator(ERROR).all_inner_texts()
        pictures = page.locator(".jp-OutputArea-output img").count()
        text = page.locator(".jp-Notebook").inner_text()
        browser.close()
    assert not errors
    assert pictures >= 8 and f"step {STEPS} of {STEPS}" in text
    assert 1 <= first[0] < second[0] < STEPS  # while the job was running
    assert first[1] < second[1]  # the curve has grown
    assert (shots / "live-1.png").read_bytes() != (shots / "live-2.png").read_bytes()
    assert (tmp_path / "runs/in-lab/report.html").exists()


IDLE = """() => document.querySelector(".jp-Notebook .jp-Cell")
    && /\\| Idle/.test(document.querySelector("#jp-main-statusbar").innerText)"""
FINISHED = """() => document.querySelector(".jp-Notebook").innerText.includes("report.html")"""
STEP = """() => {
    const view = document.querySelector(".sciftune-live")
    const step = view && view.innerText.match(/(running|finished)\\s+step (\\d+) of/)
    if (!step || !view.querySelector("svg")) return null
    const paths = [...view.querySelectorAll("svg path[d]")]
    const points = paths.map(path => (path.getAttribute("d").match(/L/g) || []).length)
    const box = view.getBoundingClientRect()
    return [Number(step[2]), Math.max(...points), box.x, box.y, box.width, box.height]
}"""


BEGUN = """() => [...document.querySelectorAll(".jp-InputPrompt")]
    .some(prompt => /\\[(\\*|\\d+)\\]/.test(prompt.innerText))"""


def run_all_cells(page, too_late):
    "Choose it in the menu; again while no cell has begun: without a kernel the choice is lost."
    begun = False
    while not begun:
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        with contextlib.suppress(too_late):
            page.wait_for_function(BEGUN, timeout=10_000)
            begun = True


def wait(page, condition, argument=None):
    "What `condition`, a function of the page, gives when it holds; an error in a cell ends it."
    either = """([condition, error, argument]) => {
        const failed = document.querySelector(error)
        return failed ? { failed: failed.innerText } : eval(condition)(argument)
    }"""
    arguments = [condition, ERROR, argument]
    found = page.wait_for_function(either, arg=arguments, polling=200).json_value()
    assert not isinstance(found, dict), found["failed"]
    return found


def watched_step(page, at_least, picture):
    "(step, points of the longest curve) of the live view once it has come so far; its picture."
    later = f"least => {{ const now = ({STEP})(); return now && now[0] >= least && now }}"
    step, points, x, y, width, height = wait(page, later, at_least)
    page.screenshot(path=str(picture), clip=dict(x=x, y=y, width=width, height=height))
    return step, points


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_of_a_run_fits_its_window(tmp_path, width, scheme):
    playwright = pytest.importorskip("playwright.sync_api", reason=NO_PLAYWRIGHT)
    run = imagined_run(tmp_path / "a run")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
        page.goto(write_page(run).as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth")
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        text = page.evaluate("getComputedStyle(document.body).color")
        ends = page.locator(".ends img").first.bounding_box()
        numbers = page.locator(".numbers").bounding_box()
        browser.close()
    assert wide <= width
    assert (brightness(back) > brightness(text)) == (scheme == "light")
    assert numbers["x"] >= 0 and numbers["x"] + numbers["width"] <= width
    assert ends["width"] > 100 and (width == 400 or ends["y"] < 900)  # on the first screen


def brightness(color):
    return sum(int(part) for part in re.findall(r"\d+", color)[:3])


def imagined_run(folder):
    folder.mkdir()
    run = RunDir(folder)
    resolve(steps=20, learning_rate=3e-4).save(run.recipe)
    for step in range(1, 21):
        row = dict(step=step, loss=1 / step, lr=1e-3, grad_norm=1.0, step_time=0.1)
        run.append_metrics(row | dict(memory_allocated_gib=0.2, time=50.0 + step))
    for step in (0, 20):
        bins = {"0-0.5": 1.0, "0.5-1": 0.5}
        held = dict(step=step, held_out=1 - step / 40, held_out_baseline=1.0, held_out_sigma=bins)
        run.append_metrics(held)
        place = run.validation_images / f"step_{step:06d}"
        place.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (64, 64), (9 * step, 90, 40 * number)).save(place / f"0{number}.png")
    return run
