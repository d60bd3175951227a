"""What a forward and backward pass of a UNet takes, launched and replayed: bf16, batch 4.

    python tests/gpu/unets.py sdxl sd15

One line for each way: kernels launched one by one, from a CUDA graph of the whole pass, with
compiled blocks, and both; each also with `channels_last`. The median milliseconds of eight passes,
the seconds until the first had ended (compiling included), and the peak of allocated memory.
"""

import contextlib
import statistics
import sys
import time

import torch
from diffusers import UNet2DConditionModel
from torch.nn import functional

from sciftune.models.sd import SD15_UNET, SDXL_UNET

UNETS = {"sd15": (SD15_UNET, 64), "sdxl": (SDXL_UNET, 128)}  # and the side of its latents
BLOCKS = ("BasicTransformerBlock", "ResnetBlock2D")
WAYS = [f"{a}{b}{c}" for b in ("", " graph") for a in ("eager", "compiled") for c in ("", " last")]


def inputs(config, side, memory_format):
    """Random arguments of a UNet, and the target of its prediction."""
    numbers = dict(device="cuda", dtype=torch.bfloat16)
    x, target = (torch.randn(4, 4, side, side, **numbers) for _ in range(2))
    text = torch.randn(4, 77, config["cross_attention_dim"], **numbers)
    added = None
    if "addition_embed_type" in config:
        times = torch.full((4, 6), 1024.0, device="cuda")
        added = dict(text_embeds=torch.randn(4, 1280, **numbers), time_ids=times)
    steps = torch.full((4,), 500, device="cuda")
    arguments = dict(encoder_hidden_states=text, added_cond_kwargs=added, return_dict=False)
    return (x.contiguous(memory_format=memory_format), steps), arguments, target


def recorded(step):
    """The same step, replayed from a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(step):
    """Seconds of a step on an idle GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(name, way):
    """Print the line of one way."""
    config, side = UNETS[name]
    layout = torch.channels_last if "last" in way else torch.contiguous_format
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device("cuda"):
        unet = UNet2DConditionModel(**config).to(torch.bfloat16).to(memory_format=layout)
    if "compiled" in way:
        torch._dynamo.config.recompile_limit = 64
        for block in unet.modules():
            if type(block).__name__ in BLOCKS:
                block.forward = torch.compile(block.forward, dynamic=False)
    arguments, named, target = inputs(config, side, layout)

    def step():
        unet.zero_grad(set_to_none=False)
        made = unet(*arguments, **named)[0]
        functional.mse_loss(made.float(), target.float()).backward()

    began = time.perf_counter()
    run = recorded(step) if "graph" in way else step
    first = seconds(run) and time.perf_counter() - began
    for _ in range(3):
        run()
    middle = statistics.median(seconds(run) for _ in range(8))
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{name} {way:20} {1e3 * middle:7.1f} ms, first {first:6.1f} s, {peak:5.1f} GiB")


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in sys.argv[1:]:
        for way in WAYS:
            with contextlib.suppress(torch.OutOfMemoryError):
                measure(name, way)
