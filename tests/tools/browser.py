"""A headless Chromium that reaches nothing outside; tests are skipped where there is none."""

import contextlib
import shutil

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextlib.contextmanager
def browser():
    "A browser of playwright. Skips the test, with the reason, where one of the two is missing."
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no browser on this machine (Debian: apt-get install chromium)")
    reason = "no playwright in this environment (pip install playwright)"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=program, args=FLAGS)
        yield opened
        opened.close()
