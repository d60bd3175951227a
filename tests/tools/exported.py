"""What a run exports, opened as others would open it, beside the network that was trained."""

import diffusers
import torch

from sciftune.models.weights import pipeline_index
from sciftune.strategies.adapters.kinds import is_adapter
from sciftune.strategies.adapters.layers import add_lora
from sciftune.training.checkpoints import CheckpointTensors


def trained_network(export, name):
    """The base with what the checkpoint trained, built as training built it, in fp32."""
    recipe, family = export.recipe, export.family
    network = family.load_denoiser(export.base()).eval()
    if recipe.lora_rank:
        add_lora(network, family, recipe)
    values = CheckpointTensors(export.checkpoint, name, export.state)
    parameters = dict(network.named_parameters())
    assert values and set(values) <= set(parameters)
    moved = 0
    for key in values:
        stored = values[key].reshape(parameters[key].shape)
        moved += not torch.equal(stored, parameters[key])
        parameters[key].data.copy_(stored)
    assert moved > len(values) // 4, "training moved next to nothing"
    return network.eval()


@torch.no_grad()
def predicted(family, base, network):
    """Of fixed noise and a caption."""
    rows = family.encode_captions(family.load_encoders(base, parts=("text",)), ["a chart"])
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(1, *family.latent_shape(64, 64), generator=draws)
    return family.predict(network, x, torch.tensor([0.7]), family.collate(rows))


def load_exported(export, folder):
    """The denoiser of a written pipeline, or of the base with written adapters."""
    family, base = export.family, export.base()
    if family.lora_layout == "peft":
        if not export.recipe.lora_rank:
            return family.load_denoiser(folder).eval()
        from peft import PeftModel

        return PeftModel.from_pretrained(family.load_denoiser(base), folder).base_model.model.eval()
    adapters, index = export.recipe.lora_rank, pipeline_index(base)
    processors = [n for n, v in index.items() if isinstance(v, list) and "Processor" in str(v[1])]
    parts = {  # they need torchvision, and what is tested does without
        n: None if n == "tokenizer" else family.load_processor(base / n) for n in processors
    }
    pipe = diffusers.DiffusionPipeline.from_pretrained(base if adapters else folder, **parts)
    if adapters:
        pipe.load_lora_weights(folder)
    network = getattr(pipe, family.denoiser_component)
    own = family.load_denoiser(base, network.dtype)
    if type(own) is not type(network):  # diffusers' modules with our forward pass
        if adapters:
            pipe.fuse_lora()
            pipe.unload_lora_weights()
        own.load_state_dict(network.state_dict())
        network = own
    return network.eval()


def check_types(export, trained, folder):
    """The run's own export holds the trained tensors, rounded once; adapters as they are."""
    family = export.family
    if export.recipe.lora_rank:
        loaded = dict(load_exported(export, folder).named_parameters())
        loaded = {n.replace(".default_0.", ".default."): p for n, p in loaded.items()}
        if type(export.family.load_denoiser(export.base())).__module__.startswith("sciftune"):
            return  # fused, to be loaded into our forward pass: what it predicts is compared
        adapters = {n: p for n, p in trained.named_parameters() if is_adapter(n)}
        assert adapters and all(torch.equal(loaded[n], p) for n, p in adapters.items())
        return
    written = family.denoiser_weights(folder)
    for name, value in trained.state_dict().items():
        assert torch.equal(written[name].bfloat16(), value.bfloat16()), name
