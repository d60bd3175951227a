"""gpu_profile.py OUT [--model qwenimage] [--blocks 6] [--batch 1] [--tiny]: where the time of a step goes, on a few blocks of real width. Times with and without optimizer and recomputation; kernel and gap
tables (trace_*.md), pictures of the steps (trace_*.png) and of their memory (memory_*.png), and the trace itself (trace_*.json.gz, for ui.perfetto.dev). --tiny: the stand-in on a CPU, where operators take the place of kernels; it shows that this works."""
import argparse, gzip, json, statistics, time
from collections import Counter
from pathlib import Path
import matplotlib; matplotlib.use('Agg')
import matplotlib.pyplot as plt, torch, torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from sciftune.core.engineconf import BLOCKS
from sciftune.core.recipe import resolve
from sciftune.losses.flow import FlowMatching
from sciftune.models.family import get_family
from sciftune.strategies.optimizers import GradientRelease, build_optimizer
from sciftune.strategies.speed import blocks_of, prepare_denoiser
from sciftune.training.bare import one_batch

# a trace
DEVICE = ('kernel', 'gpu_memcpy', 'gpu_memset')
KINDS = dict(attention=('flash', 'fmha', 'attention', 'sdpa', 'cudnn_generated'), update=('_adam_kernel', 'adam'), matrix=('gemm', 'aten::linear', 'mmbackward', 'cutlass', 'nvjet', 'xmma', '::mm', '::addmm', '::bmm', 'cublas'), copy=('memcpy', 'memset', '::copy_'))
COLOURS = dict(matrix='C0', attention='C1', update='C2', copy='C3', other='C7')

def kind_of(name):
    "What a kernel does, by its name."
    low = name.lower()
    return next((k for k, words in KINDS.items() if any(w in low for w in words)), 'other')

def events_of(trace, device=True):
    "(start, end, name) in milliseconds of what ran on the device; without one, of the outermost operators of the busiest thread."
    ev = [e for e in trace['traceEvents'] if e.get('ph') == 'X' and e.get('cat') in (DEVICE if device else ('cpu_op',))]
    if not device: busiest = Counter(e['tid'] for e in ev).most_common(1)[0][0]; ev = [e for e in ev if e['tid'] == busiest]
    out = []
    for a, b, n in sorted((e['ts']/1000, (e['ts']+e['dur'])/1000, e['name']) for e in ev):
        if device or not out or a >= out[-1][1]: out.append((a, b, n))
    return out

def gaps_of(events):
    "(milliseconds, when, what ran before, what came after) of every moment in which nothing ran."
    out, end, last = [], events[0][0], ''
    for a, b, n in events:
        if a > end: out.append((a-end, end, last, n))
        if b >= end: end, last = b, n
    return out

def report(events, steps, label):
    "A page in markdown: time by kind, the largest kernels, the gaps."
    first, last, gaps = events[0][0], max(e[1] for e in events), gaps_of(events); whole = last-first; idle = sum(g[0] for g in gaps); sums, counts, single = Counter(), Counter(), Counter()
    for a, b, n in events: sums[kind_of(n)] += b-a; counts[kind_of(n)] += 1; single[n] += b-a
    lines = [f'# {label}', '', f'{whole/steps:.2f} ms per step, of which nothing ran for {idle/steps:.2f} ms ({idle/whole:.1%}), {len(gaps)//steps} gaps.', '', '| kind | ms per step | share | calls |', '|---|---|---|---|']
    lines += [f'| {k} | {t/steps:.2f} | {t/whole:.1%} | {counts[k]//steps} |' for k, t in sums.most_common()]+['', '| kernel | ms per step |', '|---|---|']
    lines += [f'| `{n[:100]}` | {t/steps:.2f} |' for n, t in single.most_common(15)]+['', '| gap, ms | after ms | ended | began |', '|---|---|---|---|']
    return '\n'.join(lines+[f'| {g:.3f} | {at-first:.1f} | `{a[:60]}` | `{b[:60]}` |' for g, at, a, b in sorted(gaps, reverse=True)[:10]])+'\n'

def picture(events, file, label):
    "The time in five strips: what ran, by kind; white is idle."
    first = events[0][0]; span = (max(e[1] for e in events)-first)/5; fig, axes = plt.subplots(5, 1, figsize=(9, 3.4))
    for i, ax in enumerate(axes):
        for k, c in COLOURS.items(): ax.broken_barh([(a-first, b-a) for a, b, n in events if kind_of(n) == k and b-first > i*span and a-first < (i+1)*span], (0, 1), color=c, lw=0, label=k if i == 0 else None)
        ax.set_xlim(i*span, (i+1)*span); ax.set_yticks([]); ax.tick_params(labelsize=6, length=2)
    axes[0].legend(ncol=5, fontsize=7, frameon=False, loc='lower center', bbox_to_anchor=(.5, 1)); axes[-1].set_xlabel(f'ms; {label}', fontsize=7); fig.tight_layout(h_pad=.1); fig.savefig(file, dpi=130)

def memory_picture(trace, file, label, cuda, start=0):
    "Allocated memory over the traced steps; `start`: GiB allocated when the trace began."
    ev = sorted((e['ts']/1000, e['args']['Bytes']/2**30) for e in trace['traceEvents'] if e.get('name') == '[memory]' and (e['args'].get('Device Type') == 1) == cuda); t0, at, held = ev[0][0], [], start
    for t, more in ev: held += more; at.append((t-t0, held))
    fig, ax = plt.subplots(figsize=(9, 2.4)); ax.step(*zip(*at), where='post', lw=.6); ax.set_xlabel(f'ms on the host; {label}', fontsize=7); ax.set_ylabel('GiB allocated', fontsize=7); ax.tick_params(labelsize=6); ax.spines[['top', 'right']].set_visible(False)
    fig.tight_layout(); fig.savefig(file, dpi=130); return max(g for _, g in at)

ap = argparse.ArgumentParser(description=__doc__); ap.add_argument('out', type=Path); ap.add_argument('--model', default='qwenimage'); ap.add_argument('--blocks', type=int, default=6); ap.add_argument('--batch', type=int, default=1); ap.add_argument('--tiny', action='store_true')
a = ap.parse_args(); out, name, count, batch, cuda = a.out, a.model, a.blocks, a.batch, not a.tiny; out.mkdir(parents=True, exist_ok=True); device = torch.device('cuda' if cuda else 'cpu')
family = get_family(name); base = family.tiny(out/'stand-in') if a.tiny else None
config = family.config(base) | ({} if a.tiny else dict(num_layers=count) if name == 'qwenimage' else dict(num_layers=2, num_single_layers=count-2)); side = 64 if a.tiny else 1024
recipe = resolve(model=name, preset='debug', run_root='/tmp/bench', num_processes=1, micro_batch=batch, global_batch=batch, gradient_checkpointing='full', strategy='single', resolution=side, text_tokens=32 if a.tiny else 512, compile=cuda)

def seconds(f, n=8, warm=3):
    for _ in range(warm): f()
    if not cuda:
        began = time.perf_counter()
        for _ in range(n): f()
        return ((time.perf_counter()-began)/n,)*2
    torch.cuda.synchronize(); marks = [torch.cuda.Event(enable_timing=True) for _ in range(n+1)]; hosts = [time.perf_counter()]; marks[0].record()
    for m in marks[1:]: f(); m.record(); hosts.append(time.perf_counter())
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))/1000, statistics.median(b-a for a, b in zip(hosts, hosts[1:]))

def say(label, t, note=''): print(f'{label:52} {t[0]*1000:9.2f} ms, host {t[1]*1000:8.2f} ms  {note}', flush=True)

# attention
def attention():
    heads = config['num_attention_heads']; q, k, v = (torch.randn(batch, heads, 4608, 128, device='cuda', dtype=torch.bfloat16, requires_grad=True) for _ in range(3)); g = torch.randn_like(q)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for b in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(b): say(f'attention forward + backward, {b.name}', seconds(lambda: F.scaled_dot_product_attention(q, k, v).backward(g)))
    say('attention forward + backward, default', seconds(lambda: F.scaled_dot_product_attention(q, k, v).backward(g)))
if cuda: attention()

model = family.random_denoiser(config, torch.bfloat16 if cuda else torch.float32, device); dead = set(family.frozen_parameters(model))
for n, p in model.named_parameters(): p.requires_grad_(n not in dead)
prepare_denoiser(model, recipe, family); params = [p for p in model.parameters() if p.requires_grad]; total = sum(p.numel() for p in params)
objective, data = FlowMatching(recipe, family), one_batch(recipe, family, config, device); flops = family.flops(config, side, side, recipe.text_tokens)*batch
def both():
    objective.per_sample(model, data).mean().backward()
    for p in params: p.grad = None
began = time.time(); both(); cuda and torch.cuda.synchronize(); print(f'{count} blocks, {total/1e9:.3f} G parameters, first step {time.time()-began:.1f} s', flush=True)
if cuda:
    from torch._dynamo.utils import compile_times, counters
    print({k: dict(v) for k, v in counters.items() if k in ('stats', 'aot_autograd') or k == 'inductor'}); print('\n'.join(l[:100] for l in compile_times().splitlines() if any(x in l for x in ('entire_frame', 'backend_compile', 'compile_fx', 'codegen', 'async_compile', 'lowering', 'joint', 'aot_')))[:2500], flush=True)
t = seconds(both); say('forward + backward, recompute all', t, f'MFU {3*flops/t[0]/989e12:.3f}')
denoiser_run = model._gradient_checkpointing_func; model.disable_gradient_checkpointing(); t = seconds(both); say('forward + backward, recompute none', t, f'MFU {3*flops/t[0]/989e12:.3f}')
with torch.no_grad(): say('forward', seconds(lambda: objective.per_sample(model, data).mean()))
model.enable_gradient_checkpointing(denoiser_run)

def optimizers():
    from flashoptim import FlashAdamW
    import sciftune.strategies.adam as lean
    hyper = dict(lr=1e-5, weight_decay=.01, master_weight_bits=24); grads = [torch.randn_like(p) for p in params]
    place = {id(p): i for i, p in enumerate(params)}; blocks = [[place[id(p)] for p in b.parameters() if id(p) in place] for b in blocks_of(model, BLOCKS[name])]; outside = sorted(set(range(len(params)))-{i for b in blocks for i in b})
    def updates(label, opt, blocks=(), alone=range(len(params))):
        def f():
            for b in blocks: opt.step_params([params[i] for i in b], [grads[i] for i in b], opt.param_groups[0])
            for i in alone: params[i].grad = grads[i]; opt.step_param(params[i], opt.param_groups[0])
        t = seconds(f, 3, 2); say(label, t, f'{total/t[0]/1e9:.1f} G parameters/s')
        for p in params: p.grad = None
    updates('updates by flashoptim', FlashAdamW(params, **hyper)); updates('updates by LeanAdamW', lean.LeanAdamW(params, **hyper)); updates('updates by LeanAdamW, a launch per block', lean.LeanAdamW(params, **hyper), blocks, outside)
if cuda: optimizers(); torch.cuda.empty_cache()
opt = build_optimizer(params, recipe, 'flashadamw' if cuda else 'adamw', cuda, release=True); rel = GradientRelease(model, opt, 1.0, blocks_of(model, BLOCKS[name]))
def clipped(): (objective.per_sample(model, data).mean()*rel.scale).backward(); rel.finish()
say('with its optimizer, released and clipped', seconds(clipped))
STEPS = 2
before = torch.cuda.memory_allocated()/2**30 if cuda else 0
with profile(activities=[ProfilerActivity.CPU]+[ProfilerActivity.CUDA]*cuda, profile_memory=True) as prof:
    for _ in range(STEPS): clipped()
    if cuda: torch.cuda.synchronize()
label = f'{name}, {count} blocks, batch {batch}' if cuda else f'{name}, stand-in on a CPU'; stem = out/f'trace_{name}_{batch}'
prof.export_chrome_trace(f'{stem}.json'); trace = json.loads(Path(f'{stem}.json').read_text()); Path(f'{stem}.json.gz').write_bytes(gzip.compress(Path(f'{stem}.json').read_bytes())); Path(f'{stem}.json').unlink()
events = events_of(trace, cuda); text = report(events, STEPS, label); Path(f'{stem}.md').write_text(text); picture(events, f'{stem}.png', label); print(text)
print(f"peak {memory_picture(trace, str(stem).replace('trace_', 'memory_')+'.png', label, cuda, before):.2f} GiB")
