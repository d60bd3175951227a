"""The notebook that measures what autoencoders keep of figures."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sciftune.data import reading
from sciftune.data.words import Reading
from sciftune.models.family import get_family

NOTEBOOK = Path(__file__).resolve().parents[1] / "nbs" / "experiments" / "ceiling.ipynb"


def cells():
    """Return the code of its cells, the parameters first."""
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.fixture
def figures(tmp_path):
    """Eight figures of two sizes, all but one with their words, each marked by a colour."""
    rows = []
    for k in range(8):
        size = (96, 64) if k % 2 else (64, 64)
        Image.new("RGB", size, (10 * k, 200, 0)).save(tmp_path / f"{k}.png")
        rows.append(
            dict(file_name=f"{k}.png", text=f"figure {k}", labels=["Time (s)", f"{k}.5", "late"])
        )
    del rows[3]["labels"]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_sample_is_measured_as_it_is_trained(figures, tmp_path, monkeypatch):
    def read(image):
        """Read what stands in the figure of this colour; nothing in another colour."""
        red, green, blue = np.asarray(image)[image.height // 2, image.width // 2]
        if (green, blue) != (200, 0) or red % 10:
            return []
        box, texts = (0, 0, image.width, image.height // 4), ("Time (s)", f"{red // 10}.5", "added")
        late = [Reading("late", box, 20)] if image.width == 32 else []  # at one resolution alone
        return [Reading(text, box, image.height / 4) for text in texts] + late

    monkeypatch.setattr(reading, "read_text", read)
    tiny = {name: get_family(name).tiny(tmp_path / "models" / name) for name in ("klein", "flux1")}
    first, *others = cells()
    space = {}
    exec(first, space)
    models = ",".join(f"{name}-tiny={folder}" for name, folder in tiny.items())
    space |= dict(models=models, count=5, data=str(figures), resolution=64, resolutions="32")
    space |= dict(fit="pad", seed=1, out=str(tmp_path / "page"), run_root=str(tmp_path))
    space["display"] = print
    for code in others:
        exec(code, space)
    assert space["recipe"].model == "klein" and space["chosen"] != list(range(5))
    assert set(space["after"]) == {(f"{n}-tiny", side) for n in tiny for side in (32, 64)}
    for k, (image, labels) in zip(space["originals"], space["figures"][32], strict=True):
        assert image.size == ((32, 16) if k % 2 else (32, 32))  # padded, not cropped
        texts = ["Time (s)", f"{k}.5", "late"] if k != 3 else ["Time (s)", "3.5", "added"]
        assert [label.text for label in labels] == texts
        assert {label.height for label in labels if label.text != "late"} == {image.height / 4}
    for words in space["before"][64]:
        assert all(word.state == "found" for word in words if word.text not in ("added", "late"))
    assert {row[1]: row[6][:4] for row in space["by_resolution"].rows} == {
        "32": "0.00",
        "64": "0.00",
    }
    assert [line.split(":")[0] for line in space["sentences"]] == ["klein-tiny", "flux1-tiny"]
    page = (tmp_path / "page" / "ceiling.md").read_text()
    assert "black-forest-labs/FLUX.2-dev" in page and "klein-tiny | 32" in page
    assert "FLUX.1-dev |" not in page.split("Not measured")[1]
