"""scripts/inspect in a process of its own, on a collection with planted faults."""

import io
import json
import os
import subprocess

from PIL import Image

from sciftune.extras.figures.charts import draw_chart


def test_look_names_what_is_wrong(root, tmp_path, warm_python):
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    charts = {f"{i:02}.png": draw_chart(i, 0, side=64) for i in range(20)}
    for name, chart in charts.items():
        (shelf / name).write_bytes(chart.image)
        (shelf / name).with_suffix(".txt").write_text(chart.caption)
    (shelf / "03.txt").write_text("A long story. " * 60)
    Image.open(io.BytesIO(charts["05.png"].image)).save(shelf / "again.jpg", quality=80)
    Image.new("RGB", (640, 64), "red").save(shelf / "wide.png")
    (shelf / "broken.png").write_bytes(charts["07.png"].image[:99])
    for name in ("again", "wide", "broken"):
        (shelf / f"{name}.txt").write_text(name)
    words = [f"data={shelf}", "model=klein", "resolution=64", f"run_root={tmp_path / 'runs'}"]
    done = subprocess.run(
        [root / "scripts/inspect", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"SCIFTUNE_PYTHON": warm_python},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "look-shelf"
    found = json.loads((folder / "findings.json").read_text())
    named = {f["check"]: {fault["row"] for fault in f["faults"]} for f in found["findings"]}
    assert named["unreadable"] == {"broken.png"} and named["cropped"] == {"wide.png"}
    assert named["captions cut"] == {"03.png"} and "again.jpg" in str(found["findings"])
    assert (
        sum(line == f["line"] for f in found["findings"] for line in done.stdout.splitlines()) == 3
    )
    assert {"inspect.ipynb", "without_duplicates.jsonl"} <= set(os.listdir(folder))
