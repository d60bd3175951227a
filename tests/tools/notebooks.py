"""Run notebooks and files of tests, each in a process of its own, and say what they took.

    python tests/tools/notebooks.py [--workers 4] [--flags "slow cuda"] [PLACE ...] [-- OPTIONS]

A place is a notebook, a file of tests or a folder of them; options are pytest's. There is no time
limit, since a slower machine is no error: every minute a line names what is still running and for
how long, so that one that hangs is told by its name. Processes are forked from one that has
imported torch, the trainer and what else many need, which saves each some seconds. All stand in one
queue, the longest first: there are more workers than cores, since some tests mostly wait.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 20_000  # characters of what a failure has said
SPEAK_EVERY = 60.0  # seconds between two lines about what is still running
IMPORTED = (  # once, before processes are forked: what runs notebooks, and what many of them import
    "nbdev.test",
    "IPython.core.application",
    "IPython.core.logger",
    "IPython.core.magics",
    "IPython.core.oinspect",
    "sqlite3",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "matplotlib_inline.backend_inline",
    "fastcore.test",
    "nbformat.validator",
    "jsonschema",
    "pandas",
    "pyarrow.parquet",
    "pytest",
    "datasets",
    "deepspeed",
    "flashoptim",
    "cv2",
    "onnxruntime",
    "rapidocr.cal_rec_boxes",
    "rapidocr.inference_engine.onnxruntime",
    "diffusers.guiders",
    "diffusers.pipelines.flux.pipeline_flux_kontext",
    "diffusers.pipelines.onnx_utils",
    "diffusers.pipelines.pipeline_utils",
    "torch._dynamo.testing",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.profiler._cupti_monitor",
    "transformers.models.auto.tokenization_auto",
    "sciftune.planner.plan",
    "sciftune.training.trainer",
)
TESTED = ("launch.ipynb",)  # trains, and tests/processes/test_launch.py does it with papermill
LONGEST = (  # they begin first, so that workers end together
    *(
        "processes/test_families",
        "processes/test_engines",
        "processes/test_slow",
        "processes/test_docs",
    ),
    *("processes/test_launch", "processes/test_distill", "processes/test_references"),
    *("test_adapters", "bagel/test_unified", "processes/test_lora", "processes/test_ownership"),
    *("processes/test_requests", "processes/test_precision", "processes/test_buckets"),
    *("processes/test_machines", "processes/test_offload", "strategies/08_compilation"),
    *("processes/test_context", "processes/test_package", "processes/test_trackers"),
    *("kernels/test_interpreted", "processes/test_plugins"),
    *("processes/test_epochs", "processes/test_shard_states", "processes/test_exports"),
    *("planner/08_search", "figures/12_statements", "dmd/04_task", "lab/18_evaluate"),
    *("lab/06_prepare", "lab/03_jobs", "processes/test_checkpoints", "processes/test_secrets"),
    *("processes/test_guidance", "processes/test_odd_paths", "lab/04_report"),
    *("tests/test_refusals", "test_optimizers", "test_auto", "test_markup", "test_odd_values"),
    *("processes/test_quick", "test_presets", "test_odd_files", "test_model_folders"),
    *("core/05_recipe", "test_many_rows", "test_cells", "core/23_compat"),
)
NO_TESTS = 5  # pytest: none was chosen


def run(place: Path, flags: str, options: list[str], log: str) -> None:
    """Run a notebook or a file of tests with its output in `log`; exits with 1 on failure."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    run_one = run_notebook if place.suffix == ".ipynb" else run_tests
    passed = run_one(place, flags.split(), [f"--basetemp={log}.files", *options])
    sys.stdout.flush()
    sys.stderr.flush()
    Path(f"{log}.seconds").write_text(f"{cpu_seconds():.0f}")
    os._exit(0 if passed else 1)


def run_notebook(notebook: Path, flags: list[str], options: list[str]) -> bool:
    """Execute `notebook` as nbdev_test does; whether it passed."""
    from nbdev.config import get_config  # where it is missing, the log says so
    from nbdev.test import test_nb

    os.chdir(ROOT / "nbs")
    skipped = get_config().tst_flags.split()
    return test_nb(notebook, skip_flags=skipped, force_flags=flags, basepath=ROOT)[0]


def run_tests(file: Path, flags: list[str], options: list[str]) -> bool:
    """Give `file` to pytest; whether nothing failed."""
    import pytest

    os.chdir(ROOT)
    gc.unfreeze = lambda: None  # what it searches once more at its end ends with this process
    return pytest.main([str(file), "-p", "no:cacheprovider", *options]) in (0, NO_TESTS)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass
class Running:
    """A notebook or a file of tests under way."""

    place: Path
    log: str
    process: multiprocessing.Process
    began: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """Its path from the root of the repository."""
        return str(self.place.relative_to(ROOT))

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
        text = Path(self.log).read_text(errors="replace")
        counts = text.rstrip().rpartition("\n")[2] if self.place.suffix == ".py" else ""
        said = f"{'ok    ' if passed else 'FAILED'} {self.name} {self.seconds:.0f} s"
        print(f"{said}, {self.cpu} of CPU time {counts}".rstrip(), flush=True)
        if passed:
            shutil.rmtree(f"{self.log}.files", ignore_errors=True)
        else:
            print(text[-SHOWN:], flush=True)
        return passed


def start(place: Path, flags: str, options: list[str], folder: str) -> Running:
    """Fork a process that runs `place`."""
    log = os.path.join(folder, place.relative_to(ROOT).as_posix().replace("/", "-"))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run, args=(place, flags, options, log))
    process.start()
    return Running(place, log, process)


def run_all(places: list[Path], flags: str, options: list[str], workers: int) -> list[str]:
    """Run `places`, `workers` at a time; the names of those that failed."""
    waiting, running, failed = list(places), [], []
    spoke = time.time()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(start(waiting.pop(0), flags, options, folder))
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
    """The notebooks and files of tests at `places`; in folders, not those of `TESTED`."""
    found = []
    for place in places:
        path = (ROOT / place).resolve()
        inside = sorted([*path.rglob("*.ipynb"), *path.rglob("test_*.py")])
        found += [one for one in inside if one.name not in TESTED] if path.is_dir() else [path]
    return [path for path in found if ".ipynb_checkpoints" not in path.parts]


def rank(place: Path) -> int:
    """Where `place` stands among those that take longest; all others come after them."""
    name = place.with_suffix("").as_posix()
    return next((rank for rank, end in enumerate(LONGEST) if name.endswith(end)), len(LONGEST))


def used_by_tests() -> Iterator[str]:
    """Modules that many tests import."""
    import forked
    import warm

    yield from ("pytest", *forked.USED_LATER, *warm.IMPORTED)


def import_plugins() -> None:
    """Import families, objectives and strategies, which are read when they are wanted."""
    from sciftune.core.recipe import resolve
    from sciftune.core.registry import records
    from sciftune.models.family import get_family
    from sciftune.training.task import get_task

    resolve()  # reads all records
    for wanted, kind in ((get_family, "models"), (get_task, "objectives")):
        for name in records(kind):
            with contextlib.suppress(ImportError, ValueError):  # some are of extras
                wanted(name)
    with contextlib.suppress(ImportError):  # an extra, too
        importlib.import_module("sciftune.data.reading").networks()


def import_once(tests: bool = False) -> None:
    """Import what the forked processes would import one by one; for `tests`, theirs, too."""
    gc.disable()  # nothing to collect there, and much time to search
    shown = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # packages say what they lack of a GPU
    try:
        for name in itertools.chain(IMPORTED, used_by_tests() if tests else ()):
            with contextlib.suppress(ImportError):  # some are of extras
                importlib.import_module(name)
        import_plugins()
    finally:
        os.dup2(shown, 2)
    gc.freeze()  # nor do the forked ones search it
    gc.enable()


def main() -> int:
    """1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", default=["nbs"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--flags", default="")
    words, options = sys.argv[1:], []
    if "--" in words:
        words, options = words[: words.index("--")], words[words.index("--") + 1 :]
    arguments = parser.parse_args(words)
    places = sorted(chosen(arguments.places), key=rank)
    sys.path.insert(0, str(ROOT))  # as nbdev_test does: this tree is tested
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and tests send it
    import_once(any(place.suffix == ".py" for place in places))
    from shared_figures import draw_once  # imports this tree

    began = time.time()
    with tempfile.TemporaryDirectory() as figures:
        draw_once(figures)
        failed = run_all(places, arguments.flags, options, arguments.workers)
    took = f"{time.time() - began:.0f} s, {cpu_seconds():.0f} s of CPU time"
    print(f"{len(places)} notebooks and files of tests in {took}; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what was imported for others says much when it is unloaded
