"""Flow matching with a robust loss: only what differs from `sciftune.objectives.flow`."""

from torch import Tensor, nn

from sciftune.objectives.flow.loss import FlowMatching, noised
from sciftune.objectives.flow.task import FlowTask


def pseudo_huber(
    error: Tensor,  # (B, ...)
    delta: float,
) -> Tensor:  # (B,)
    """2δ²(√(1+(e/δ)²)-1), averaged over a sample; e² where |e| is far below δ."""
    root = (1 + (error / delta).square()).sqrt()
    return (2 * error.square() / (root + 1)).flatten(1).mean(1)


class HuberMatching(FlowMatching):
    """Flow matching, compared by `pseudo_huber`."""

    def per_sample(self, denoiser: nn.Module, batch: dict) -> Tensor:
        """Unweighted loss of each sample, (B,)."""
        x_sigma = noised(batch["x0"], batch["noise"], batch["sigma"])
        velocity = self.family.predict(denoiser, x_sigma, batch["sigma"], batch["conditioning"])
        target = batch["noise"] - batch["x0"]
        return pseudo_huber(velocity.float() - target.float(), self.recipe.huber_delta)


class HuberTask(FlowTask):
    """Everything else is as in fine-tuning by flow matching."""

    objective_class = HuberMatching
