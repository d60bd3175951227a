"""Pictures that keep what the base knew: adapters are trained towards the base's own prediction."""

import numpy as np
import pytest
import torch
from encoded import cached, recipe_of
from PIL import Image

from sciftune.core.recipe import RecipeError
from sciftune.core.registry import records
from sciftune.models.compat import adapted_layers
from sciftune.models.family import get_family
from sciftune.objectives.common.batches import LatentBatches
from sciftune.objectives.epsilon.data import EpsilonBatches
from sciftune.objectives.epsilon.loss import NoisePrediction
from sciftune.objectives.flow.loss import FlowMatching
from sciftune.strategies.adapters.layers import add_lora
from sciftune.training.task import OptimizerStep

CASES = dict(klein=(FlowMatching, LatentBatches), sd15=(NoisePrediction, EpsilonBatches))


def folders(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("own", "known"):
        (tmp_path / name).mkdir()
        for i in range(4):
            pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    return f"{tmp_path}/own:1,{tmp_path}/known:1"


class Wrapped(torch.nn.Module):
    "A network as an engine wraps it."

    def __init__(self, raw):
        super().__init__()
        self.raw = raw

    def forward(self, *args, **kwargs):
        return self.raw(*args, **kwargs)

    def after_eval(self):
        pass


@pytest.mark.parametrize("model", CASES)
def test_the_prior_is_the_prediction_of_the_base(tmp_path, model):
    "Zero at the start; later the distance between both predictions; other samples as before."
    loss, batches = CASES[model]
    fields = dict(model=model, prompt="noise", lora_rank=2, micro_batch=8, global_batch=8)
    fields |= dict(objective="epsilon" if model == "sd15" else "flow", caption_dropout=0)
    data = folders(tmp_path)
    recipe = recipe_of(tmp_path, data, prior_data=f"{tmp_path}/known", prior_weight=3.0, **fields)
    plain = recipe_of(tmp_path, data, **fields)
    family, found = get_family(model), cached(recipe, tmp_path)
    make = (family, found.train, found.tensors, found.negative_key)
    (batch,) = batches(recipe, *make)(0)
    (usual,) = batches(plain, *make)(0)
    assert "prior" not in usual and batch["ids"] == usual["ids"]
    prior = batch["prior"]
    assert prior.tolist() == [name.startswith("1:") for name in batch["ids"]]
    assert 0 < prior.sum() < 8
    net = family.random_denoiser(family.config(found.base), torch.float32, seed=1)
    add_lora(net, family, recipe)
    network, objective = Wrapped(net), loss(recipe, family)
    errors = objective.per_sample(network, batch)
    assert (errors[prior] == 0).all()  # adapters begin at nothing
    assert torch.equal(errors[~prior], loss(plain, family).per_sample(network, usual)[~prior])
    with torch.no_grad():
        for layer in adapted_layers(net):
            for weight in layer.lora_B.values():
                weight.weight.normal_(std=0.1)
    losses = objective.per_sample(network, batch)
    moved = losses[prior].detach()
    assert (moved > 0).all()
    assert torch.equal(losses[~prior], loss(plain, family).per_sample(network, usual)[~prior])
    total, sums = objective.loss(OptimizerStep("denoiser"), dict(denoiser=network), batch)
    weight = batch["weight"] * torch.where(prior, 3.0, 1.0)
    torch.testing.assert_close(total, (losses * weight).mean())
    torch.testing.assert_close(sums["prior"], torch.stack([moved.sum(), prior.sum().float()]))
    total.backward()  # the graph is that of the adapted pass alone
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


def test_a_prior_that_nothing_would_compare_with_is_refused(tmp_path):
    data = f"{tmp_path}/a:1,{tmp_path}/b:1"
    wrong = {
        "prior_data: needs lora_rank": dict(prior_data=f"{tmp_path}/b", lora_rank=0),
        "must be one of several collections in data": dict(prior_data=f"{tmp_path}/c"),
        "prior_weight: needs prior_data": dict(prior_weight=2.0),
        "not with context_parallel": dict(
            prior_data=f"{tmp_path}/b", context_parallel=2, num_processes=2, strategy="fsdp"
        ),
    }
    if "preference" in records("objectives"):  # an extra's; others read one collection alone
        needs = "prior_data: needs objective 'epsilon' or 'flow'"
        wrong[needs] = dict(prior_data=f"{tmp_path}/b", objective="preference")
    for said, fields in wrong.items():
        with pytest.raises(RecipeError, match=said):
            recipe_of(tmp_path, data, **dict(model="klein", lora_rank=4) | fields)
    with pytest.raises(RecipeError, match="must be one of several collections in data"):
        recipe_of(tmp_path, f"{tmp_path}/a", lora_rank=4, prior_data=f"{tmp_path}/a")
