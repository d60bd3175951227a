"""What only a GPU can show, at tiny size, without nbdev.

    python tests/gpu/selftest.py [WORK_FOLDER [CHECK ...]]

All checks, or those named. One line per check; exit code 1 when one fails.
"""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from flashoptim import FlashAdamW, reconstruct_fp32_param
from safetensors.torch import load_file, save_file
from torch import nn

from sciftune.core.plan import Plan, PlanRow
from sciftune.core.recipe import resolve
from sciftune.core.registry import find_kernel, find_record
from sciftune.core.rundir import RunDir, new_run
from sciftune.models.family import get_family
from sciftune.models.flux2 import TINY_KLEIN
from sciftune.models.qwenimage import TINY_QWEN_IMAGE
from sciftune.strategies.compilation import (
    blocks_of,
    checkpoint_blocks,
    compile_blocks,
    compiled_graphs,
    real_rotary,
)
from sciftune.strategies.float8 import float8_linears
from sciftune.strategies.gradient_release import GradientRelease
from sciftune.strategies.launch_files import write_configs
from sciftune.strategies.optimizers import build_optimizer

WORK, FAILED = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()), []
PATIENCE = 1800  # seconds for a run: so long that only one that hangs needs them


def check(f):
    if sys.argv[2:] and f.__name__ not in sys.argv[2:]:
        return
    began = time.time()
    try:
        note = f() or ""
        print(f"ok    {f.__name__} ({time.time() - began:.0f} s) {note}", flush=True)
    except Exception:
        FAILED.append(f.__name__)
        print(
            f"FAIL  {f.__name__} ({time.time() - began:.0f} s)\n{traceback.format_exc()[-3000:]}",
            flush=True,
        )


def step(name, config, change=lambda d: None, dtype=torch.float32):
    family = get_family(name)
    d = family.random_denoiser(config, dtype, "cuda")
    change(d)
    g = torch.Generator("cuda").manual_seed(0)

    def r(*s):
        return torch.randn(s, device="cuda", generator=g)

    given = {
        k: r(2, *((48, s[1]) if len(s) == 2 else s))
        for k, s in family.caption_shapes(dict(d.config), 48).items()
    }
    if name == "qwenimage":
        given["mask"] = None
    out = family.predict(
        d, r(2, *family.latent_shape(128, 128)), torch.tensor([0.3, 0.8], device="cuda"), given
    )
    out.square().mean().backward()
    return out.detach(), {n: p.grad for n, p in d.named_parameters() if p.grad is not None}


def far(a, b):
    "Distance of `a` from `b` as a part of the length of `b`."
    return ((a - b).norm() / b.norm()).item()


def worst(a, b):
    return max(
        [(a[0] - b[0]).abs().max().item()]
        + [((a[1][k] - b[1][k]).abs().max() / (a[1][k].abs().max() + 1e-12)).item() for k in a[1]]
    )


def checkpointed_and_compiled(name):
    "A function that does both to the blocks of a denoiser of the family `name`."
    blocks = find_record("models", name).block_classes

    def change(denoiser):
        checkpoint_blocks(denoiser, blocks, 1)
        compile_blocks(real_rotary(denoiser), blocks, fullgraph=True)

    return change


@check
def real_rotary_and_compiler_change_nothing():
    torch.backends.cuda.matmul.allow_tf32 = False
    notes = []
    for name, config in (("qwenimage", TINY_QWEN_IMAGE), ("klein", TINY_KLEIN)):
        plain = step(name, config)
        real = worst(plain, step(name, config, real_rotary))
        comp = worst(plain, step(name, config, checkpointed_and_compiled(name)))
        notes.append(f"{name}: real {real:.1e}, compiled {comp:.1e}")
        assert real < 1e-4 and comp < 1e-3, notes
    return "; ".join(notes)


@check
def float8_trains():
    config = TINY_KLEIN | dict(
        attention_head_dim=64, axes_dims_rope=(16,) * 4, num_attention_heads=4
    )
    names = find_record("models", "klein").block_classes

    def float8(denoiser):
        float8_linears(denoiser, blocks_of(denoiser, names), smallest=256)

    a = step("klein", config, dtype=torch.bfloat16)
    b = step("klein", config, float8, torch.bfloat16)
    difference = far(b[0], a[0])
    assert 0 < difference < 0.1, difference
    return f"relative difference to bf16 {difference:.3f}"


def twenty_steps(kind, shape, size):
    """Train a parameter by the optimizer `kind`, with gradients of about `size`.

    Returns the optimizer, the parameter, how far it has moved, and the last gradient's norm.
    """
    torch.manual_seed(0)
    start = torch.randn(shape, device="cuda").bfloat16() * 0.02
    exact = kind is torch.optim.AdamW
    p = nn.Parameter(start.double() if exact else start.clone())
    generator = torch.Generator("cuda").manual_seed(1)
    narrow = {} if exact else dict(master_weight_bits=24)
    opt = kind([p], lr=1e-4, weight_decay=0.01, **narrow)
    for _ in range(20):
        gradient = torch.randn(p.shape, device="cuda", generator=generator) * size
        p.grad = gradient.bfloat16().to(p.dtype)
        norm = p.grad.float().norm()
        opt.step()
    end = p.detach()
    if not exact:
        end = reconstruct_fp32_param(end, opt.state[p]["error_bits"])
    return opt, p, end.double() - start.double(), norm


def squares_after(opt, p, gradient):
    "The sum of squares that a step measures."
    p.grad = torch.full_like(p, gradient)
    opt.step()
    return opt.take_squares()


@check
def the_lean_kernel_is_adamw():
    """Beside flashoptim's own, both against AdamW in double precision.

    With ordinary gradients and with those of a large model.
    """
    notes = []
    for shape, size in (
        ((1000, 129), 1e-2),
        ((4096, 4096), 1e-2),
        ((4096, 4096), 1e-6),
        ((7,), 1e-2),
        ((3072,), 1e-6),
    ):
        exact = twenty_steps(torch.optim.AdamW, shape, size)[2]
        flash = far(twenty_steps(FlashAdamW, shape, size)[2], exact)
        opt, p, moved, norm = twenty_steps(find_kernel("flashadamw"), shape, size)
        lean, total = far(moved, exact), opt.take_squares().sqrt()
        notes.append(f"{lean:.4f} (flashoptim {flash:.4f})")
        told = (shape, size, notes, total, norm)
        assert lean < 0.05 and lean < 1.5 * flash and abs(total / norm - 1) < 1e-4, told
        state = opt.state[p]["exp_avg_sq"]
        square = state.materialize()
        state.set_data(square)  # what a checkpoint does
        assert (state.materialize() - square).abs().max() <= 0.01 * square.max()
        assert torch.equal(squares_after(opt, p, 0.01), squares_after(opt, p, 0.01))
        squares_after(opt, p, float("nan"))
        assert p.isnan().all()
    return "relative distance of the update from AdamW " + ", ".join(notes)


@check
def gradient_release_clips_by_the_previous_norm():
    torch.manual_seed(0)
    m = nn.Linear(64, 64, bias=False).cuda().bfloat16()
    x = torch.randn(8, 64, device="cuda").bfloat16()
    opt = build_optimizer(list(m.parameters()), resolve(learning_rate=1e-3), "flashadamw", True)
    rel = GradientRelease(m, opt, 1e-3)
    ref = nn.Linear(64, 64, bias=False).cuda().bfloat16()
    ref.load_state_dict(m.state_dict())
    for i in range(3):
        ref.load_state_dict(m.state_dict())
        ref.zero_grad()
        ref(x).float().pow(2).mean().backward()
        true = ref.weight.grad.float().norm().item()
        scale = rel.scale.item()
        (m(x).float().pow(2).mean() * rel.scale).backward()
        n = rel.finish().item()
        assert m.weight.grad is None and abs(n - true) < 0.02 * true, (n, true)
        assert abs(rel.scale.item() - min(1, 1e-3 / (n + 1e-6))) < 1e-4, (n, scale)
        assert (i == 0) == (scale == 1), (n, scale)


class Residual(nn.Module):
    "A block with matrices, biases, and a parameter of a size that the kernel does not take."

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(512, 256), nn.Linear(256, 512)
        self.few = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return x + self.b(self.a(x).relu()) * self.few.mean()


def states_of(opt, p):
    state = opt.state[p]
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    codes, scales = (mean._quantized, square._quantized), (mean._scales, square._scales)
    return [state["error_bits"], *codes, *scales, state["step"]]


def trained_by_blocks(blocks, steps=5):
    "Parameters, states and gradient norms; `blocks` as `GradientRelease` takes it."
    torch.manual_seed(0)
    m = nn.Module()
    m.outer = nn.Linear(512, 512)
    m.blocks = nn.ModuleList([Residual() for _ in range(3)])
    m.cuda().bfloat16()
    x = torch.randn(64, 512, device="cuda").bfloat16()
    opt = build_optimizer(list(m.parameters()), resolve(learning_rate=1e-3), "flashadamw", True)
    rel, norms = GradientRelease(m, opt, 0.5, blocks), []
    for _ in range(steps):
        y = m.outer(x)
        for b in m.blocks:
            y = b(y)
        (y.float().square().mean() * rel.scale).backward()
        norms.append(rel.finish())
        assert all(p.grad is None for p in m.parameters())
    assert len(opt.launches) == (3 if blocks is None else 0)
    assert all(len(launch.fits) == 4 for launch in opt.launches.values())
    states = [t for p in m.parameters() for t in states_of(opt, p)]
    return [*(p.detach() for p in m.parameters()), *states, *norms]


class ManyBlocks:
    "60 blocks of 8 parameters with their gradients, and the ways to update them."

    def __init__(self):
        self.blocks = [[self.parameter() for _ in range(8)] for _ in range(60)]
        self.gradients = [[torch.randn_like(p) for p in block] for block in self.blocks]
        every = [p for block in self.blocks for p in block]
        self.opt = build_optimizer(every, resolve(learning_rate=1e-3), "flashadamw", True)
        self.group = self.opt.param_groups[0]

    def parameter(self):
        return nn.Parameter(torch.zeros(256, 512, device="cuda").bfloat16())

    def alone(self):
        "One launch for each parameter."
        for block, gradients in zip(self.blocks, self.gradients, strict=True):
            for p, gradient in zip(block, gradients, strict=True):
                p.grad = gradient
                self.opt.step_param(p, self.group)
                p.grad = None

    def together(self):
        "One launch for each block."
        for block, gradients in zip(self.blocks, self.gradients, strict=True):
            self.opt.step_params(block, gradients, self.group)

    def moved(self):
        "One launch for each block, whose gradients are at other addresses than before."
        for gradients in self.gradients:
            gradients.reverse()
        self.together()


def host_microseconds():
    "What each way of `ManyBlocks` costs the host for a parameter."
    many = ManyBlocks()

    def best(update):
        update()
        update()
        took = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            update()
            took.append(time.perf_counter() - began)
        return min(took) / 480 * 1e6

    return best(many.alone), best(many.together), best(many.moved)


@check
def one_launch_updates_a_block():
    "Bit by bit what one launch per parameter does, and what either costs the host."
    a, b = trained_by_blocks(None), trained_by_blocks([])
    apart = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]
    assert not apart, apart
    alone, together, moved = host_microseconds()
    return (
        f"host microseconds per parameter: {alone:.1f} alone, {together:.1f} by blocks of 8, "
        f"{moved:.1f} when every gradient has moved"
    )


@check
def a_step_waits_for_nothing():
    from sciftune.objectives.flow.loss import FlowMatching
    from sciftune.project.baseline import one_batch
    from sciftune.strategies.compilation import prepare_denoiser
    from sciftune.strategies.engine import Engine
    from sciftune.training.metrics import DeferredMetrics, Stopwatch

    recipe = resolve(
        model="klein",
        precision="bf16-master24",
        compile=True,
        gradient_checkpointing="full",
        micro_batch=2,
        global_batch=2,
        resolution=64,
        text_tokens=32,
        run_root=str(WORK),
    )
    family, e = get_family("klein"), Engine(recipe)
    net = e.network(
        prepare_denoiser(family.random_denoiser(TINY_KLEIN, torch.bfloat16, "cuda"), recipe)
    )
    objective, batch = FlowMatching(recipe, family), one_batch(recipe, family, TINY_KLEIN, e.device)
    late, watch = DeferredMetrics(), Stopwatch(e.device)
    before = 0
    try:
        for i in range(6):
            if i == 3:
                before = compiled_graphs()
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            watch.start()
            loss, _ = objective.loss(objective.optimizer_steps(i)[0], dict(denoiser=net), batch)
            watch.mark("forward")
            net.backward(loss, last=True)
            norm = net.step()
            watch.mark("backward")
            e.total(torch.stack([loss.detach()]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    late.push(dict(step=1), dict(loss=loss, norm=norm))
    row = late.flush()[0]
    assert row["loss"] == row["loss"] and compiled_graphs() == before, "compiled again"
    return f"{before} graphs, none after the third step"


@check
def streamed_states_train_as_resident_ones():
    from sciftune.strategies.offload import HostStates, tensors_of

    def trained(resident, steps=6):
        torch.manual_seed(0)
        m = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda().bfloat16()
        opt = build_optimizer(list(m.parameters()), resolve(learning_rate=1e-3), "flashadamw", True)
        x = torch.randn(64, 2048, device="cuda").bfloat16()

        def prepare(p):
            opt._ensure_state_initialized(p, hparams=opt.param_groups[0])
            return opt.state[p]

        before = torch.cuda.memory_allocated()
        away = HostStates(opt, list(m.parameters()), prepare, resident)
        rel = GradientRelease(m, away, 1.0)
        for _ in range(steps):
            (m(x).float().square().mean() * rel.scale).backward()
            rel.finish()
            away.finish()
        held = (torch.cuda.memory_allocated() - before) / 2**20
        out = [p.detach().clone() for p in m.parameters()]
        for p in m.parameters():
            with away.at_hand(p):
                out += [t.clone() for t in tensors_of(opt.state[p]).values()]
        return out, held, len(away.goes)

    (a, full, _), (b, small, gone), (c, half, some) = trained(1e12), trained(0.0), trained(5e7)
    assert gone == 8 and 0 < some < 8 and small < 0.6 * full, (gone, some, small, full)
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(a, b, c, strict=False)), [
        i for i, (x, y) in enumerate(zip(a, b, strict=False)) if not torch.equal(x, y)
    ]
    return f"{full:.0f} MiB resident, {half:.0f} and {small:.0f} streamed"


@check
def streamed_weights_train_as_resident_ones():
    "Compiled blocks, every second one checkpointed, bf16 with 24-bit masters; memory is spared."
    from torch.utils.checkpoint import checkpoint

    from sciftune.strategies.offload import HostStates
    from sciftune.strategies.streamed_weights import HostWeights

    def trained(streams, resident=0.0, steps=6):
        gc.collect()
        before = torch.cuda.memory_allocated()  # of what an earlier check has left
        torch.manual_seed(0)
        m = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048)) for _ in range(8)))
        m = m.cuda().bfloat16()
        for block in m:
            block.forward = torch.compile(block.forward)
        x = torch.randn(64, 2048, device="cuda").bfloat16()
        keeper = HostWeights(m, list(m), x.device, resident) if streams else None
        params = list(m.parameters())
        opt = build_optimizer(params, resolve(learning_rate=1e-3), "flashadamw", True)

        def prepare(p):
            with keeper.at_hand(p) if keeper else contextlib.nullcontext():
                opt._ensure_state_initialized(p, hparams=opt.param_groups[0])
            return opt.state[p]

        away = HostStates(opt, params, prepare, 0.0)
        rel = GradientRelease(m, away, 1.0)
        if keeper:
            keeper.keep_updates()
        for _ in range(steps):
            y = x
            for number, block in enumerate(m):
                y = checkpoint(block, y, use_reentrant=False) if number % 2 else block(y)
            (y.float().square().mean() * rel.scale).backward()
            rel.finish()
            away.finish()
        torch.cuda.synchronize()
        held = (torch.cuda.memory_allocated() - before) / 2**20
        out = []
        for p in params:
            with keeper.at_hand(p) if keeper else contextlib.nullcontext():
                out.append(p.detach().clone().cpu())
        return out, held, len(keeper.blocks) if keeper else 0

    (a, full, _), (b, small, gone), (c, _, some) = trained(False), trained(True), trained(True, 3e7)
    for other in (b, c):
        assert all(torch.equal(x, y) for x, y in zip(a, other, strict=True))
    assert gone == 8 and 0 < some < 8 and small < full - 30, (gone, some, small, full)
    return f"{full:.0f} MiB resident, {small:.0f} streamed"


@check
def a_large_text_encoder_waits_in_host_memory():
    "The same states whole on the GPU and with half of the layers copied for each batch."
    import transformers

    from sciftune.models import weights

    config = transformers.Qwen3Config(
        vocab_size=2000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    folder, gpu = WORK / "encoder", torch.device("cuda", 0)
    transformers.Qwen3Model(config).bfloat16().save_pretrained(folder)
    size = weights.stored_numel(folder) * 2 / weights.GIB
    ids = torch.arange(512, device=gpu).view(4, 128)
    states, took, memory = [], [], []
    for free in (100.0, weights.ENCODING_ROOM + size / 2):
        weights.free_memory_gib = lambda device, free=free: free
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        encoder = weights.load_text_encoder(folder, "Qwen3Model", torch.bfloat16, gpu)
        assert next(encoder.parameters()).device == gpu
        with torch.no_grad():
            states.append(encoder(ids).last_hidden_state)
            torch.cuda.synchronize()
            began = time.time()
            encoder(ids)
            torch.cuda.synchronize()
        took.append(time.time() - began)
        memory.append((torch.cuda.max_memory_allocated() - before) / weights.GIB)
        del encoder
        torch.cuda.empty_cache()
    assert torch.equal(*states) and memory[1] < 0.75 * memory[0], (memory, far(*states))
    return (
        f"{size:.2f} GiB: {memory[0]:.2f} and {memory[1]:.2f} GiB, {took[0]:.3f}, {took[1]:.3f} s"
    )


@check
def the_bus():
    "Not a check of the program: what streaming can hope for."
    from sciftune.strategies.locked_memory import host_memory

    n = 2**30
    began = time.time()
    (a, b), locks = host_memory([n, n], True)
    for lock in locks:
        lock.result()
    locked = time.time() - began
    x, y = (torch.empty(n, dtype=torch.uint8, device="cuda") for _ in range(2))
    s, t = torch.cuda.Stream(), torch.cuda.Stream()

    def seconds(into, out):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(6):
            if into:
                with torch.cuda.stream(s):
                    x.copy_(a, non_blocking=True)
            if out:
                with torch.cuda.stream(t):
                    b.copy_(y, non_blocking=True)
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 6, host / 6

    seconds(True, True)
    into, out, both = seconds(True, False), seconds(False, True), seconds(True, True)
    assert both[1] < 0.2 * both[0], "copies are not asynchronous"
    one_way, other_way, at_once = (n / took[0] / 1e9 for took in (into, out, both))
    return (
        f"GB/s in {one_way:.1f}, out {other_way:.1f}, both ways at once {at_once:.1f} each; "
        f"{2 * n / locked / 1e9:.1f} GB/s to lock"
    )


def trained(run, recipe):
    command = [sys.executable, "-m", "accelerate.commands.launch", *write_configs(recipe, run)[2:]]
    launch = json.loads((run.path / "launch.json").read_text())
    exact = {"DIFFUSERS_ATTN_BACKEND": "_native_math", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    r = subprocess.run(
        command,
        env=os.environ | launch["environment"] | exact,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert r.returncode == 0, (r.stdout + r.stderr)[-2500:]
    return {
        row["step"]: (row["loss"], row["grad_norm"])
        for row in run.read_metrics()
        if "step_time" in row
    }


@check
def a_resumed_run_is_the_uninterrupted_one():
    recipe = resolve(
        model="qwenimage",
        run_root=str(WORK),
        name="whole",
        steps=6,
        micro_batch=2,
        global_batch=2,
        precision="bf16-master24",
        compile=False,
        validation_steps=6,
        validation_sample_steps=2,
        validation_images=1,
        held_out_sigmas=1,
        checkpoint_steps=3,
        checkpoints_kept=3,
        figures=16,
        held_out=2,
        cache_batch=16,
        max_grad_norm=0.05,
        learning_rate=1e-3,
        num_processes=1,
    )
    whole = new_run(recipe)
    full = trained(whole, recipe)
    part = RunDir(WORK / "part")
    first = sorted(whole.checkpoints.glob("step_*"))[0]
    shutil.copytree(first, part.checkpoints / first.name)
    again = trained(part, recipe.model_copy(update=dict(name="part", resume="latest")))
    assert sorted(again) == [4, 5, 6], sorted(again)
    assert all(again[s] == full[s] for s in again), {s: (full[s], again[s]) for s in again}
    pngs = list(part.validation_images.rglob("*.png"))
    assert pngs, "no validation images"
    shown_losses = [round(full[s][0], 5) for s in full]
    exported = len(list(part.model.rglob("*.safetensors")))
    return f"losses {shown_losses}, {exported} exported files"


@check
def cuda_graphs_train_as_launches():
    """Losses, norms and held-out losses, with an average validated in between.

    Figures of several sizes, adapters, gradients that are kept until the update. Two runs without
    graphs are as far apart, where gradients are released.
    """
    fields = dict(model="klein", run_root=str(WORK), num_processes=1, steps=6, micro_batch=2)
    fields |= dict(global_batch=2, figures=24, held_out=4, held_out_sigmas=1, compile=True)
    fields |= dict(validation_steps=3, validation_sample_steps=2, validation_images=1)
    fields |= dict(checkpoint_steps=0, export=False, ema_decay=0.9, cache_batch=16)
    fields |= dict(learning_rate=1e-3, precision="bf16-master24", gradient_checkpointing="none")
    cases = dict(
        sizes=dict(fit="bucket", bucket_min=48, bucket_max=80, bucket_step=16),
        adapters=dict(lora_rank=4, ema_decay=0.0),
        updated_late=dict(gradient_release=False, precision="bf16-mixed"),
    )

    def run_of(case, graphs):
        name = f"{case}-{'graphs' if graphs else 'launches'}"
        recipe = resolve(**fields | cases[case], cuda_graphs=graphs, name=name)
        run = new_run(recipe)
        steps = trained(run, recipe)
        held_out = [row["held_out"] for row in run.read_metrics() if "held_out" in row]
        return torch.tensor([*(x for row in steps.values() for x in row), *held_out])

    with ThreadPoolExecutor(4) as several:
        found = {case: [several.submit(run_of, case, g) for g in (0, 1)] for case in cases}
        rows = {case: [run.result() for run in runs] for case, runs in found.items()}
    apart = {case: ((graphs - plain) / plain).abs().max() for case, (plain, graphs) in rows.items()}
    assert max(apart.values()) < 1e-3 and all(len(x) == 15 for x, _ in rows.values()), rows
    return ", ".join(f"{case} {deviation:.1e}" for case, deviation in apart.items())


@check
def a_checkpoint_in_place_is_the_copied_one():
    "Same bytes, whether states and weights are on the GPU or streamed; a resume goes on exactly."
    sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
    from host_memory import wide_pipeline

    folder, _ = wide_pipeline(WORK / "wide", 0.3, 12)
    torch.manual_seed(0)
    for file in (folder / "transformer").glob("*.safetensors"):
        save_file({k: 0.02 * torch.randn(v.shape) for k, v in load_file(file).items()}, file)
    fields = dict(model="qwenimage", model_path=str(folder), run_root=str(WORK), num_processes=1)
    fields |= dict(steps=4, checkpoint_steps=2, micro_batch=1, global_batch=1, held_out=0)
    fields |= dict(validation_steps=0, export=False, resolution=64, text_tokens=32, figures=16)
    fields |= dict(precision="bf16-master24", compile=False, plan_check=False)
    said = []
    for offload in ("none", "optimizer", "params"):
        files, rows = {}, {}
        for place in ("copied", "in_place"):
            recipe = resolve(**fields, offload=offload, name=f"{offload}-{place}")
            run = new_run(recipe)
            Plan(run=PlanRow(saves_in_place=place == "in_place")).save(run.plan)
            rows[place] = trained(run, recipe)
            files[place] = [p.read_bytes() for p in sorted(run.checkpoints.glob("*/*.distcp"))]
        assert rows["copied"] == rows["in_place"], rows
        assert len(files["copied"]) == 2 and files["copied"] == files["in_place"]
        part = RunDir(WORK / f"{offload}-resumed")
        first = sorted(run.checkpoints.glob("step_*"))[0]
        shutil.copytree(first, part.checkpoints / first.name)
        Plan(run=PlanRow(saves_in_place=True)).save(part.plan)
        again = trained(part, recipe.model_copy(update=dict(name=part.path.name, resume="latest")))
        assert again == {step: rows["copied"][step] for step in (3, 4)}, (again, rows)
        said.append(f"{offload}: {len(files['copied'][1]) / 2**20:.0f} MiB")
    return ", ".join(said)


@check
def every_engine_trains_as_one_process():
    "On two GPUs where there are, else by one process; in bf16: losses and norms within 2 %."
    processes = min(2, torch.cuda.device_count())
    found = {}
    engines = dict(ddp_shards=dict(strategy="ddp", shard_states=True)) if processes > 1 else {}
    engines |= {name: dict(strategy=name) for name in ("single", "ddp", "fsdp", "zero2", "zero3")}
    for engine, fields in engines.items():
        count = 1 if engine == "single" else processes
        recipe = resolve(
            model="klein",
            run_root=str(WORK),
            name=engine,
            **fields,
            num_processes=count,
            steps=4,
            micro_batch=2 // count,
            global_batch=2,
            precision="bf16-mixed" if engine.startswith("zero") else "bf16-master24",
            compile=False,
            plan_check=False,
            validation_steps=0,
            checkpoint_steps=0,
            export=False,
            held_out=0,
            learning_rate=3e-3,
            max_grad_norm=0.0,
            figures=16,
            cache_batch=16,
        )
        rows = trained(new_run(recipe), recipe)
        found[engine] = torch.tensor(list(rows.values()))  # (steps,2): loss, norm of gradients
    single = found["single"]
    apart = {engine: ((rows - single) / single).abs().max() for engine, rows in found.items()}
    assert max(apart.values()) < 0.02, found
    still = recipe.model_copy(update=dict(name="still", learning_rate=1e-12))
    rows = trained(new_run(still), still)
    moved = ((torch.tensor(list(rows.values())) - single) / single).abs().max()
    assert moved > 3 * max(apart.values()), "without updates the steps differ more than engines"
    return f"{processes} processes, furthest {max(apart.values()):.4f}, without updates {moved:.4f}"


failed = f"{len(FAILED)} of the checks failed {FAILED or ''}"
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}: {failed}", flush=True)
sys.exit(bool(FAILED))
