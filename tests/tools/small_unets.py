"""U-Nets of two levels in the place of three or four: a third of the parameters to train."""

from pathlib import Path
from unittest import mock

from sciftune.models import sd
from sciftune.models.family import get_family

CONFIGS = dict(sd15=sd.TINY_SD15, sdxl=sd.TINY_SDXL)
LEVELS = dict(
    sd15=dict(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(8, 16),
    ),
    sdxl=dict(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 16),
        transformer_layers_per_block=(1, 1),
        attention_head_dim=(1, 2),
    ),
)


def small_unet(model: str, folder: Path) -> str:
    """Write the stand-in of `model` with such a U-Net; returns its folder, a `model_path`."""
    with mock.patch.dict(CONFIGS[model], LEVELS[model]):
        return str(get_family(model).tiny(folder / f"small-{model}"))
