"""What many rows cost: the page and the live view of a long run, and opening a large collection.

    python tests/tools/many_rows.py [--steps 100000] [--rows 1000000] [--files 100000]

Prints seconds of CPU time and the growth of the largest resident size. The tests count work in the
place of time: lines parsed and rows looked up, see nbs/1_core/06_rundir.ipynb.
"""

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.data.parquet import Parquet
from sciftune.data.readers import folder_reader, json_rows
from sciftune.lab.live import live_view
from sciftune.lab.report_page import write_page

NAMES = ("loss", "grad_norm", "step_time", "data_time", "forward_time", "backward_time", "mfu")
NAMES += ("optimizer_time", "memory_allocated_gib", "memory_reserved_gib", "host_memory_gib")


def measured(what: str, work: Callable) -> None:
    """Do some work in a process of its own and print what it cost."""

    def inside() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.process_time()
        work()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{what:40} {time.process_time() - begun:8.2f} s {grown:8.0f} MiB", flush=True)

    process = multiprocessing.get_context("fork").Process(target=inside)
    process.start()
    process.join()


def long_run(folder: Path, steps: int) -> RunDir:
    """A run folder of so many steps."""
    run, draw = RunDir(folder), random.Random(0)
    resolve(preset="tiny", steps=steps).save(run.recipe)
    with open(run.metrics, "w") as file:
        for step in range(1, steps + 1):
            row = dict.fromkeys(NAMES, draw.random()) | dict(step=step, lr=1e-4, time=1e9 + step)
            file.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                held = dict(step=step, held_out=1.0, held_out_baseline=1.0, validation_time=1.0)
                file.write(json.dumps(held) + "\n")
    return run


def refresh(run: RunDir) -> None:
    """Look at a run once more after a step."""
    run.append_metrics(dict(step=10**9, loss=1.0, step_time=1.0))
    live_view(run)


def large_shard(path: Path, rows: int) -> None:
    """A parquet file of so many captions and ids."""
    texts = [f"a line chart of quantity number {i}" for i in range(rows)]
    ids = [f"figure-{i:09}" for i in range(rows)]
    images = pa.array([b"x"] * rows)
    pq.write_table(pa.table(dict(image=images, text=texts, id=ids)), path, row_group_size=10_000)


def large_folder(folder: Path, files: int) -> Path:
    """So many images with captions beside them, and a list of them that lies elsewhere."""
    with open(folder.with_suffix(".jsonl"), "w") as listing:
        for i in range(files):
            image = folder / f"{i // 1000:04}" / f"{i:06}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(b"x")
            text = f"a line chart of quantity number {i}"
            image.with_suffix(".txt").write_text(text)
            name = str(image.relative_to(folder))
            listing.write(json.dumps(dict(file_name=name, text=text)) + "\n")
    return folder


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        run = long_run(folder, given.steps)
        measured(f"report.html, {given.steps} steps", lambda: write_page(RunDir(folder)))
        live_view(run)
        measured("one more look of the live view", lambda: refresh(run))
        shard = folder / "a.parquet"
        large_shard(shard, given.rows)
        measured(f"list a parquet of {given.rows} rows", lambda: Parquet(folder, [shard]))
        (folder / "a.png").write_bytes(b"x")
        with open(folder / "a.jsonl", "w") as file:
            for i in range(given.rows):
                file.write(json.dumps(dict(file_name="a.png", id=i, text=f"a chart {i}")) + "\n")
        measured(
            f"list a jsonl of {given.rows} rows", lambda: json_rows(folder, folder / "a.jsonl")
        )
        images = large_folder(folder / "images", given.files)
        listing = images.with_suffix(".jsonl")
        measured(f"list a folder of {given.files} images", lambda: folder_reader(images))
        measured(f"list a jsonl of {given.files} images", lambda: json_rows(images, listing))


if __name__ == "__main__":
    main()
