"""`scripts/docs` builds the site strictly, and a browser reads it from its folder, offline.

Skipped, with the reason, where the docs extra is missing; what a browser does also where none is.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import browser

LEFT_OUT = (".git", ".venv", "_docs", "runs", "build", "*.egg-info", "__pycache__", ".*_cache")


def build(root):
    "scripts/docs of a copy, with this Python."
    return subprocess.run(
        [root / "scripts/docs"],
        capture_output=True,
        text=True,
        env=os.environ | {"SCIFTUNE_PYTHON": sys.executable},
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of the repository."
    root = Path(__file__).resolve().parent.parent.parent
    missing = [name for name in ("material", "latex2mathml") if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"the docs extra is not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("docs") / "sciftune"
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return folder


@pytest.fixture(scope="module")
def site(copy):
    done = build(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return copy / "_docs/site"


@pytest.fixture
def pictures(tmp_path):
    "Where screenshots go."
    return Path(os.environ.get("SCIFTUNE_SCREENSHOTS", tmp_path))


def read_offline(page):
    "Note every address outside that the page asks for."
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    return lambda: [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


@pytest.mark.browser
@pytest.mark.parametrize("width, scheme", [(1200, "light"), (400, "dark")])
def test_front_page_module_page_and_search(site, pictures, width, scheme):
    with browser() as opened:
        page = opened.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
        elsewhere = read_offline(page)
        for name in ("index", "nbs/2_data/06_buckets", "docs/guides/own_data"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            drawn = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
            assert all(drawn), name
            page.screenshot(path=pictures / f"{Path(name).name}-{width}-{scheme}.png")
        if width == 400:
            page.locator("label.md-header__button[for=__search]").click()
        page.locator(".md-search__input").click()  # Loads the index; the bar opens in a moment
        page.locator(".md-search__input").press_sequentially("buckets", delay=50)
        found = page.locator(".md-search-result__link")
        found.first.wait_for()
        page.screenshot(path=pictures / f"search-{width}-{scheme}.png")
        titles = page.locator(".md-search-result__link h1").all_inner_texts()
        found.first.click()
        page.wait_for_url("**/*.html*h=*")
        assert elsewhere() == []
    assert titles[0].lower() == "buckets", titles


def test_every_notebook_is_a_page(site, copy):
    left_out = {copy / "nbs" / "index.ipynb"}
    for path in set((copy / "nbs").rglob("*.ipynb")) - left_out:
        page = site / path.relative_to(copy).with_suffix(".html")
        assert page.exists(), page


@pytest.mark.slow
def test_broken_link_fails(site, copy):
    page = copy / "docs/guides/own_data.md"
    page.write_text(page.read_text() + "\n[a page that is not there](nowhere.md)\n")
    done = build(copy)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr, done.stderr
