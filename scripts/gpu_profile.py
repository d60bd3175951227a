"""gpu_profile.py OUT [MODEL] [BLOCKS] [BATCH]: where the time of a block goes, on a few blocks of real width. Times with and without optimizer, recomputation, float8; a kernel table; attention kernels."""
import sys, time
from pathlib import Path
import torch, torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from sciftune.core.engineconf import BLOCKS
from sciftune.core.recipe import resolve
from sciftune.losses.flow import FlowMatching
from sciftune.models.family import get_family
from sciftune.strategies.optimizers import GradientRelease, build_optimizer
from sciftune.strategies.speed import blocks_of, prepare_denoiser, recompute
from sciftune.training.bare import one_batch

out = Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True); name, count, batch = (sys.argv[2:3] or ['qwenimage'])[0], int((sys.argv[3:4] or [6])[0]), int((sys.argv[4:5] or [1])[0])
family = get_family(name); config = family.config(None) | (dict(num_layers=count) if name == 'qwenimage' else dict(num_layers=2, num_single_layers=count-2))
recipe = resolve(model=name, preset='debug', run_root='/tmp/bench', num_processes=1, micro_batch=batch, global_batch=batch, gradient_checkpointing='full', strategy='single')

def seconds(f, n=8, warm=3):
    for _ in range(warm): f()
    torch.cuda.synchronize(); a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True); began = time.perf_counter(); a.record()
    for _ in range(n): f()
    host = (time.perf_counter()-began)/n; b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b)/1000/n, host

def say(label, t, note=''): print(f'{label:52} {t[0]*1000:9.2f} ms, host {t[1]*1000:8.2f} ms  {note}', flush=True)

# attention
heads = config['num_attention_heads']; q, k, v = (torch.randn(batch, heads, 4608, 128, device='cuda', dtype=torch.bfloat16, requires_grad=True) for _ in range(3)); g = torch.randn_like(q)
from torch.nn.attention import SDPBackend, sdpa_kernel
for b in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
    with sdpa_kernel(b): say(f'attention forward + backward, {b.name}', seconds(lambda: F.scaled_dot_product_attention(q, k, v).backward(g)))
say('attention forward + backward, default', seconds(lambda: F.scaled_dot_product_attention(q, k, v).backward(g))); del q, k, v, g

model = family.random_denoiser(config, torch.bfloat16, 'cuda'); dead = set(family.frozen_parameters(model))
for n, p in model.named_parameters(): p.requires_grad_(n not in dead)
prepare_denoiser(model, recipe, family); params = [p for p in model.parameters() if p.requires_grad]; total = sum(p.numel() for p in params)
objective, data = FlowMatching(recipe, family), one_batch(recipe, family, config, torch.device('cuda')); flops = family.flops(config, 1024, 1024, 512)*batch
def both():
    objective.per_sample(model, data).mean().backward()
    for p in params: p.grad = None
began = time.time(); both(); torch.cuda.synchronize(); print(f'{count} blocks, {total/1e9:.3f} G parameters, first step {time.time()-began:.1f} s', flush=True)
from torch._dynamo.utils import compile_times, counters
print({k: dict(v) for k, v in counters.items() if k in ('stats', 'aot_autograd') or k == 'inductor'}); print('\n'.join(l[:100] for l in compile_times().splitlines() if any(x in l for x in ('entire_frame', 'backend_compile', 'compile_fx', 'codegen', 'async_compile', 'lowering', 'joint', 'aot_')))[:2500], flush=True)
t = seconds(both); say('forward + backward, recompute all', t, f'MFU {3*flops/t[0]/989e12:.3f}')
denoiser_run = model._gradient_checkpointing_func; model.disable_gradient_checkpointing(); t = seconds(both); say('forward + backward, recompute none', t, f'MFU {3*flops/t[0]/989e12:.3f}')
with torch.no_grad(): say('forward', seconds(lambda: objective.per_sample(model, data).mean()))
model.enable_gradient_checkpointing(denoiser_run)

from flashoptim import FlashAdamW, enable_gradient_release
import sciftune.strategies.adam as lean
hyper = dict(lr=1e-5, weight_decay=.01, master_weight_bits=24); grads = [torch.randn_like(p) for p in params]
def updates(label, opt):
    def f():
        for p, gr in zip(params, grads): p.grad = gr; opt.step_param(p, opt.param_groups[0])
    t = seconds(f, 3, 2); say(label, t, f'{total/t[0]/1e9:.1f} G parameters/s')
    for p in params: p.grad = None
updates('updates by flashoptim', FlashAdamW(params, **hyper))
best = (lean.BLOCK, lean.PER_PROCESSOR, lean.WARPS)
for lean.BLOCK, lean.PER_PROCESSOR, lean.WARPS in (best, (1024, 16, 4), (1024, 32, 4), (1024, 16, 2), (1024, 8, 8), (512, 16, 4), (512, 32, 2), (2048, 8, 8), (2048, 8, 4), (4096, 8, 8)):
    updates(f'updates by LeanAdamW, {lean.BLOCK} x {lean.PER_PROCESSOR}, {lean.WARPS} warps', lean.LeanAdamW(params, **hyper))
lean.BLOCK, lean.PER_PROCESSOR, lean.WARPS = best; del grads; torch.cuda.empty_cache()
opt = build_optimizer(params, recipe, 'flashadamw', True); rel = GradientRelease(model, opt, 1.0)
def clipped(): (objective.per_sample(model, data).mean()*rel.scale).backward(); rel.finish()
began = time.time(); clipped(); torch.cuda.synchronize(); print(f'first step with its optimizer {time.time()-began:.1f} s', flush=True)
say('with its optimizer, released and clipped', seconds(clipped))
with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
    for _ in range(2): clipped()
    torch.cuda.synchronize()
text = prof.key_averages().table(sort_by='self_cuda_time_total', row_limit=45, max_name_column_width=90)
(out/f'kernels_{name}_{batch}.txt').write_text(text)
kernels = sorted(((e.self_device_time_total/2000, e.count//2, e.key) for e in prof.key_averages() if str(e.device_type).endswith('CUDA')), reverse=True)
print(f'kernels: {sum(k[0] for k in kernels):.1f} ms per step'); print('\n'.join(f'{ms:8.2f} ms {n:5} x {key[:110]}' for ms, n, key in kernels[:22]), flush=True)
