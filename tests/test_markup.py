"""Names and captions of other people stay text in every page: nothing in them becomes markup.

Each page is rendered as Jupyter and hubs render it, and looked through for what the text would
have made: an element, a link, a picture, a cell of a table, the end of a block of code.
"""

import json
from html.parser import HTMLParser

import mistune
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from sciftune.core.markup import escaped
from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.lab.compare import differences_table, plot_losses, plot_pictures, results_table
from sciftune.lab.live import live_view
from sciftune.lab.look import DataFinding, DataLook, Fault
from sciftune.lab.look_page import faults_table, findings_table, sample_page
from sciftune.lab.plots import Table, compact, plot_images
from sciftune.lab.report import report_notebook
from sciftune.lab.report_page import page
from sciftune.project.site import write_notebook_page
from sciftune.training.card import model_card

TEXTS = (
    "<zzz onload=1>",
    '"><zzz>',
    "'><zzz x='",
    "&lt;zzz&gt;",
    "![p](zzz:1)",
    "[l](zzz:1) [r][zzz:2]",
    "a | zzz | b",
    "`code` **bold** _it_ ~~gone~~ # h",
    "```  ~~~  <zzz>",
    "$\\frac{zzz$ {{ zzz }} {% zzz %}",
    "<!-- zzz --> -- ]]> <?zzz?>",
    "line\u2028break\x1b[31m\u202ezzz",
)
MADE = ("code", "strong", "em", "del", "h1", "h2", "a", "img", "zzz")
markdown = mistune.create_markdown(escape=False, plugins=["table", "strikethrough", "url"])


class Seen(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.bad = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.bad += [tag] if tag == "zzz" or "onload" in dict(attrs) else []
        self.bad += [v for k, v in attrs if k in ("href", "src") and (v or "").startswith("zzz")]

    def handle_data(self, data):
        self.text.append(data)


def shown(text):
    """How a text looks in a page: one line, without what cannot be seen."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def words(seen):
    return " ".join("".join(seen.text).split())


@pytest.mark.parametrize("text", TEXTS)
def test_escaped_text_is_shown_as_it_is(text):
    seen = Seen(markdown(f"# {escaped(text)}\n\n{escaped(text)}\n"))
    assert sorted(seen.elements) == ["h1", "p"] and words(seen) == f"{shown(text)} {shown(text)}"
    table = Seen(markdown(Table(["a", text], [[text, "b"], [1, text]])._repr_markdown_()))
    assert sorted(set(table.elements)) == ["table", "tbody", "td", "th", "thead", "tr"]
    assert table.elements.count("td") == 4 and words(table).count(shown(text)) == 3


@pytest.fixture(params=TEXTS)
def run(request, tmp_path):
    """A run whose names and captions are one text."""
    text = request.param
    run = RunDir(tmp_path / text.replace("/", ""))
    run.path.mkdir()
    recipe = resolve(preset="tiny", steps=9, lora_rank=2)
    one_line = "".join(c for c in text if c.isprintable())
    recipe = recipe.model_copy(
        update=dict(
            caption_prefix=one_line,
            validation_prompts=(one_line, "a"),
            data=one_line,
            model_path=one_line,
        )
    )
    recipe.save(run.recipe)
    run.append_metrics(dict(step=1, loss=1.0, lr=1e-3, step_time=1.0, held_out=1.0))
    run.append_metrics(dict(event="trouble", step=1, name=text, cause=text, cure=text))
    run.append_metrics(dict(event=text, step=1, why=text))
    run.command.write_text(text)
    run.log.write_text(text)
    for step in (0, 1):
        folder = run.validation_images / f"step_{step:06}"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "00.png")
        (folder / "prompts.json").write_text(json.dumps([text]))
    finding = dict(check=text, says=text, cure=text, faults=[dict(row=text, value=1, says=text)])
    (run.path / "findings.json").write_text(json.dumps(dict(findings=[finding])))
    run.record.write_text(json.dumps(dict(data=text, packages=dict(sciftune=text, torch=text))))
    run.text = text
    return run


def test_pages_of_a_run(run, tmp_path):
    for html in (page(run), live_view(run)):
        seen = Seen(html)
        assert not seen.bad and shown(run.text) in shown("".join(seen.text)), html[:500]
    look = DataLook("d", "klein", 1, 1, True, [DataFinding("cropped", run.text, run.text, 1.0)])
    look.findings[0].faults.append(Fault(run.text, 1.0, run.text))
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    resolve(preset="tiny", steps=8).save(other.recipe)
    tables = [
        findings_table(look),
        faults_table(look.findings[0]),
        differences_table([run, other]),
        results_table([run, other]),
    ]
    cells = [new_code_cell("1", outputs=[_output(table)]) for table in tables]
    cells = [c for c in report_notebook(run).cells if c.cell_type == "markdown"] + cells
    nbformat.write(new_notebook(cells=cells), tmp_path / "page.ipynb")
    write_notebook_page(tmp_path / "page.ipynb", tmp_path / "page.md")
    for text in (model_card(run, resolve(), run.path, pictures=False), *map(_markdown, tables)):
        plain = text.partition("\n---\n")[2] if text.startswith("---") else text
        assert not Seen(markdown(plain)).bad, plain
    seen = Seen(markdown((tmp_path / "page.md").read_text()))
    assert not seen.bad and not {"a", "img", "del", "em", "strong"} & set(seen.elements)


def _markdown(table):
    return table._repr_markdown_()


def _output(table):
    data = {"text/markdown": _markdown(table), "text/plain": repr(table)}
    return new_output("display_data", data=data)


def test_figures_draw_any_text(run, tmp_path):
    """A `$` in a caption begins no formula, which would end the page."""
    for figure in (plot_images(run), plot_losses([run]), plot_pictures([run])):
        compact(figure)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    Image.new("RGB", (64, 32)).save(shelf / "a.png")
    (shelf / "a.txt").write_text(run.text)
    from sciftune.data.sources import open_collection

    look = DataLook("d", "klein", 1, 1, True, [])
    compact(sample_page(resolve(), open_collection(shelf), [0], look))
