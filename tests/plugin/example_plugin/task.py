"""Flow matching with a robust loss: only its loss; the rest is `sciftune.objectives.common`."""

from torch import Tensor, nn

from sciftune.objectives.common.denoising import DenoisingObjective
from sciftune.objectives.common.task import DenoisingTask
from sciftune.objectives.common.velocity import noised


def pseudo_huber(
    error: Tensor,  # (B, ...)
    delta: float,
) -> Tensor:  # (B,)
    """2δ²(√(1+(e/δ)²)-1), averaged over a sample; e² where |e| is far below δ."""
    root = (1 + (error / delta).square()).sqrt()
    return (2 * error.square() / (root + 1)).flatten(1).mean(1)


class HuberMatching(DenoisingObjective):
    """Flow matching, compared by `pseudo_huber`."""

    def per_sample(self, denoiser: nn.Module, batch: dict) -> Tensor:
        """Unweighted loss of each sample, (B,)."""
        x_sigma = noised(batch["x0"], batch["noise"], batch["sigma"])
        velocity = self.family.predict(denoiser, x_sigma, batch["sigma"], batch["conditioning"])
        target = batch["noise"] - batch["x0"]
        return pseudo_huber(velocity.float() - target.float(), self.recipe.huber_delta)


class HuberTask(DenoisingTask):
    """Everything else is as in fine-tuning by flow matching."""

    objective_class = HuberMatching
