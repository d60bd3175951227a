"""A notebook-first lab for fine-tuning large image generators on scientific figures.

    from sciftune import launch, prepare_run, resolve

    run = prepare_run(resolve(model="qwenimage", name="first"))  # plans it and writes its folder
    launch(run)  # trains it, and shows its log

The names below are imported at first use: those that start and watch runs work without torch.
"""

import importlib
import logging
import os
import pkgutil
import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("sciftune runs on Linux and macOS; on Windows run it in WSL 2")

if TYPE_CHECKING:  # for editors and type checkers, which cannot follow __getattr__
    from .core.recipe import Recipe, resolve
    from .core.rundir import RunDir
    from .data.sources import open_collection
    from .lab.jobs import attach, launch, stop
    from .lab.prepare import prepare_run
    from .models.family import get_family
    from .planner.plan import plan
    from .training.trainer import train

__version__ = "0.2.0"
__all__ = [
    "Recipe",
    "RunDir",
    "attach",
    "get_family",
    "launch",
    "open_collection",
    "plan",
    "prepare_run",
    "resolve",
    "stop",
    "train",
]

_MODULES = {
    "core.recipe": ("Recipe", "resolve"),
    "core.rundir": ("RunDir",),
    "data.sources": ("open_collection",),
    "lab.jobs": ("attach", "launch", "stop"),
    "lab.prepare": ("prepare_run",),
    "models.family": ("get_family",),
    "planner.plan": ("plan",),
    "training.trainer": ("train",),
}
_PACKAGES = [name for _, name, is_package in pkgutil.iter_modules(__path__) if is_package]

_WARN_AT_IMPORT = (  # of kernels for other GPUs, and of image processors that Pillow replaces
    "torchao",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
    "transformers.utils.import_utils",
)
for _name in _WARN_AT_IMPORT:
    logging.getLogger(_name).setLevel(logging.ERROR)

_CPU = "Setting accelerator to CPU"  # DeepSpeed warns of it in every process without a GPU
logging.getLogger("DeepSpeed").addFilter(lambda record: _CPU not in record.getMessage())


# onnxruntime, which diffusers imports, would send events to Microsoft and leave a file in TMPDIR
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Threads of an OpenMP pool wait for each other by spinning: with other work on the same cores a step
# takes ten times as long. Read when torch is imported, and by every process that this one starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __getattr__(name: str):
    """Return a name of `__all__`, or a subpackage, imported now."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what a user imports, and the subpackages."""
    return sorted([*__all__, *_PACKAGES, "__version__"])
