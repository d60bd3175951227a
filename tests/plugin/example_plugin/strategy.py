"""DDP whose gradients are averaged in small pieces."""

from accelerate import Accelerator, DistributedDataParallelKwargs

from sciftune.core.registry import StrategyRecord
from sciftune.strategies.ddp import DDP

RECORDS = [
    StrategyRecord(
        name="ddp_small_buckets",
        implementation="SmallBuckets",
        summary="ddp whose gradients are averaged a megabyte at a time",
        reads=("lora_base",),
    )
]


class SmallBuckets(DDP):
    """A replica in each process; averaging begins earlier and sends more often."""

    def start(self, *arguments, **named) -> Accelerator:
        """The process's accelerator, which wraps networks with its `ddp_handler`."""
        accelerator = super().start(*arguments, **named)
        accelerator.ddp_handler = DistributedDataParallelKwargs(
            bucket_cap_mb=1, gradient_as_bucket_view=True
        )
        return accelerator
