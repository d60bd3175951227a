"""U-Nets of two levels in the place of three or four: half of the parameters to train."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from sciftune.models import sd
from sciftune.models.family import get_family

CONFIGS = dict(sd15=sd.TINY_SD15, sdxl=sd.TINY_SDXL)
LEVELS = dict(
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(8, 16),
)
OF_SDXL = dict(transformer_layers_per_block=(1, 1), attention_head_dim=(1, 2))


@contextmanager
def two_levels(model: str) -> Iterator[None]:
    """Build stand-ins of `model` with such a U-Net, if they have one."""
    with mock.patch.dict(CONFIGS.get(model, {}), LEVELS | OF_SDXL if model == "sdxl" else LEVELS):
        yield


def small_unet(model: str, folder: Path) -> str:
    """Write the stand-in of `model` with such a U-Net; returns its folder, a `model_path`."""
    with two_levels(model):
        return str(get_family(model).tiny(folder / f"small-{model}"))
