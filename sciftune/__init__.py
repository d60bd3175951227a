"""A notebook-first lab for fine-tuning large image generators on scientific figures."""

import logging
import sys

if sys.platform == "win32":
    raise ImportError("sciftune runs on Linux and macOS; on Windows run it in WSL 2")

__version__ = "0.1.0"

for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # Each import warns of kernels for other GPUs
