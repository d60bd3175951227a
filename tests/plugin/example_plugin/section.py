"""What the launching kernel must know about the objective: its record and its field. No torch."""

from sciftune.core.fields import Section, field
from sciftune.core.registry import ObjectiveRecord

RECORDS = [
    ObjectiveRecord(
        name="huber",
        summary="flow matching whose loss grows linearly for large errors",
        section="example_plugin.section:HuberSection",
        task="example_plugin.task:HuberTask",
        models=("qwenimage", "klein"),
        reads=(
            "held_out",
            "held_out_sigmas",
            "max_bad_fraction",
            "text_tokens",
            "caption_dropout",
            "gradient_checkpointing",
            "figures_seed",
        ),
    )
]


class HuberSection(Section):
    """Where the loss turns from a square into a line."""

    huber_delta: float = field(1.0, "huber: error beyond which the loss grows linearly", gt=0)
