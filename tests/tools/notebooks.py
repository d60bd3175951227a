"""Run notebooks as tests, each in a process of its own, and say at any time which ones run.

    python tests/tools/notebooks.py [--workers 3] [--flags "slow cuda"] [FOLDER_OR_NOTEBOOK ...]

There is no time limit, since a slower machine is no error: every minute a line names the notebooks
that are still running and for how long, so that one that hangs is told by its name. Processes are
forked from one that has imported torch, the trainer and what else many need, which saves each
some seconds.
"""

import argparse
import contextlib
import gc
import importlib
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEAK_EVERY = 60.0  # seconds between two lines about what is still running
IMPORTED = (  # once, before processes are forked: what runs notebooks, and what many of them import
    "nbdev.test",
    "matplotlib.backends.backend_agg",
    "matplotlib_inline.backend_inline",
    "nbformat.validator",
    "jsonschema",
    "pandas",
    "pyarrow.parquet",
    "deepspeed",
    "diffusers.guiders",
    "diffusers.pipelines.onnx_utils",
    "diffusers.pipelines.pipeline_utils",
    "transformers.models.auto.tokenization_auto",
    "sciftune.training.trainer",
)
TESTED = ("launch.ipynb",)  # trains, and tests/processes/test_launch.py does it with papermill
LONGEST = (  # they begin first, so that workers end together
    "strategies/08_compilation",
    "planner/08_search",
    "dmd/04_task",
    "training/07_encoding",
    "lab/06_prepare",
    "lab/03_jobs",
    "lab/04_report",
    "planner/04_profile",
    "planner/05_ledger",
    "figures/06_edits",
    "unified/04_task",
    "strategies/07_lora",
)


def run(notebook: Path, flags: str, log: str) -> None:
    """Execute `notebook` as nbdev_test does, with its output in `log`; exits with 1 on failure."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from nbdev.config import get_config  # where it is missing, the log says so
    from nbdev.test import test_nb

    os.chdir(ROOT / "nbs")
    passed, _ = test_nb(
        notebook,
        skip_flags=get_config().tst_flags.split(),
        force_flags=flags.split(),
        basepath=ROOT,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    Path(f"{log}.seconds").write_text(f"{cpu_seconds():.0f}")
    os._exit(0 if passed else 1)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass
class Running:
    """A notebook under way."""

    notebook: Path
    log: str
    process: multiprocessing.Process
    began: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """Its path from the root of the repository."""
        return str(self.notebook.relative_to(ROOT))

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.time() - self.began

    @property
    def cpu(self) -> str:
        """Its CPU time, '?' where it did not come to its end."""
        measured = Path(f"{self.log}.seconds")
        return f"{measured.read_text()} s" if measured.exists() else "?"

    def report(self) -> bool:
        """Print how it ended; whether it passed."""
        self.process.join()
        passed = self.process.exitcode == 0
        said = f"{'ok    ' if passed else 'FAILED'} {self.name} {self.seconds:.0f} s"
        print(f"{said}, {self.cpu} of CPU time", flush=True)
        if not passed:
            print(Path(self.log).read_text(errors="replace")[-6000:], flush=True)
        return passed


def start(notebook: Path, flags: str, folder: str) -> Running:
    """Fork a process that runs `notebook`."""
    log = os.path.join(folder, notebook.relative_to(ROOT).as_posix().replace("/", "-"))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run, args=(notebook, flags, log))
    process.start()
    return Running(notebook, log, process)


def run_all(notebooks: list[Path], flags: str, workers: int) -> list[str]:
    """Run `notebooks`, `workers` at a time; the names of those that failed."""
    waiting, running, failed = list(notebooks), [], []
    spoke = time.time()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(start(waiting.pop(0), flags, folder))
            time.sleep(0.05)
            ended = [one for one in running if not one.process.is_alive()]
            running = [one for one in running if one not in ended]
            failed += [one.name for one in ended if not one.report()]
            if time.time() - spoke > SPEAK_EVERY:
                spoke = time.time()
                told = ", ".join(f"{one.name} for {one.seconds:.0f} s" for one in running)
                print(f"...    still running: {told}; {len(waiting)} wait", flush=True)
    return failed


def chosen(places: list[str]) -> list[Path]:
    """The notebooks at `places`, notebooks or folders; in folders, not those of `TESTED`."""
    found = []
    for place in places:
        path = (ROOT / place).resolve()
        inside = [one for one in sorted(path.rglob("*.ipynb")) if one.name not in TESTED]
        found += inside if path.is_dir() else [path]
    return [path for path in found if ".ipynb_checkpoints" not in path.parts]


def later(notebook: Path) -> bool:
    """Whether `notebook` is none of those that take longest."""
    return not notebook.with_suffix("").as_posix().endswith(LONGEST)


def import_once() -> None:
    """Import what the forked processes would import one by one."""
    gc.disable()  # nothing to collect there, and much time to search
    shown = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # packages say what they lack of a GPU
    try:
        for name in IMPORTED:
            with contextlib.suppress(ImportError):  # some are of extras
                importlib.import_module(name)
    finally:
        os.dup2(shown, 2)
    gc.freeze()  # nor do the forked ones search it
    gc.enable()


def main() -> int:
    """1 when a notebook failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", default=["nbs"])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # as nbdev_test does: the notebooks test this tree
    import_once()
    from shared_figures import draw_once  # imports this tree

    notebooks = sorted(chosen(arguments.places), key=later)
    began = time.time()
    with tempfile.TemporaryDirectory() as figures:
        draw_once(figures)
        failed = run_all(notebooks, arguments.flags, arguments.workers)
    print(f"{len(notebooks)} notebooks in {time.time() - began:.0f} s; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what was imported for others says much when it is unloaded
