"""bench_table.py: docs/bench.md, docs/bench.png and the table of docs/bagel.md from docs/bench.jsonl, with the planner's memory and time beside what was measured."""
import json
import matplotlib; matplotlib.use('Agg')
import matplotlib.pyplot as plt
from pathlib import Path
from sciftune.models.family import get_family
from sciftune.strategies.memory import device_speed, measured_setting, planned_peak, profile, step_seconds

ROOT = Path(__file__).resolve().parent.parent
rows = [json.loads(l) for l in (ROOT/'docs/bench.jsonl').read_text().splitlines()]
profiles = {}

def predicted(r):
    "(peak GiB allocated, seconds per step) that the planner expects of a measured setting; None where it has no say."
    if r['loop'] != 'trainer' or r.get('offload', 'none') != 'none' and r.get('resident_gib') is None: return None
    s, again = measured_setting(r); k = s.recipe.model, s.recipe.objective, s.recipe.gan, s.recipe.resolution, s.recipe.text_tokens, s.recipe.lora_rank
    if k not in profiles: profiles[k] = profile(s.recipe, get_family(r['model']), vae=False)
    p = profiles[k]; n = len(p.blocks) if again == 'all' else 0 if again == 'none' else int(again)
    return planned_peak(p, s, n), step_seconds(p, s, n, device_speed(r['gpus'][0]), generator=False), s.recipe

def line(r):
    "A row of the table."
    made = predicted(r); f = lambda k, n=3: f'{r[k]:.{n}f}' if r.get(k) is not None else ''
    memory = (f'{made[0]:.1f}', f'{made[0]/r["allocated_gib"]-1:+.1%}') if made else ('', '')
    time = (f'{made[1]:.3f}', f'{made[1]/r["step_time"]-1:+.0%}') if made else ('', '')
    kind = (made[2] if made else measured_setting(r)[0].recipe); kind = kind.objective+' + GAN'*kind.gan+f', LoRA {kind.lora_rank}'*bool(kind.lora_rank)
    return ' | '.join(['', r['model'], kind, f"{r['resolution']}", r['strategy']+', kept gathered'*(r.get('reshard') is False)+', bf16 sums'*(r.get('reduce_type') == 'bf16')+(f", {r['offload']} offloaded, {r['device_memory_gib']:g} GiB" if r.get('offload', 'none') != 'none' else ''), f"{r['processes']}", r['precision'], f"{r['micro_batch']}", f"{r['recompute']}", r['loop'],
                       f"{f('step_time')} ± {f('step_time_spread')}", *time, f('allocated_gib', 1), *memory, f('mfu'), f('hfu'), f('tokens_per_second', 0), r['date'], '']).strip()

def pictures():
    "MFU by batch, and where the time of a step goes: docs/bench.png."
    good = [r for r in rows if r.get('step_time') and not r.get('error') and r['loop'] == 'trainer' and r['model'] in ('qwenimage', 'klein', 'flux1') and r['strategy'] == 'single' and r.get('offload', 'none') == 'none']
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1, 1.3)); kind = lambda r: f"{r['model']}, {'LoRA' if r.get('lora_rank') else r['precision'].removeprefix('bf16-')}"
    for k in sorted({kind(r) for r in good}):
        best = {b: max(r['mfu'] for r in good if kind(r) == k and r['micro_batch'] == b) for b in sorted({r['micro_batch'] for r in good if kind(r) == k})}
        left.plot(list(best), list(best.values()), 'o-', label=k)
    left.set_xlabel('batch per GPU'); left.set_ylabel('MFU, best setting'); left.set_xticks(sorted({r['micro_batch'] for r in good})); left.set_ylim(bottom=0); left.legend(fontsize=8, frameon=False)
    last = {f"{kind(r)}, batch {r['micro_batch']}, {r['recompute']} recomputed": r for r in good if r.get('backward_time')}; names, bars = list(last), list(last.values()); from_ = [0.0]*len(bars)
    for part, c in dict(forward='C0', backward='C1', optimizer='C2').items():
        width = [r.get(f'{part}_time', 0)/r['step_time'] for r in bars]; right.barh(range(len(bars)), width, left=from_, color=c, label=part); from_ = [a+b for a, b in zip(from_, width)]
    right.barh(range(len(bars)), [max(0, 1-a) for a in from_], left=from_, color='.85', label='rest'); right.set_yticks(range(len(bars)), names, fontsize=7); right.invert_yaxis(); right.set_xlim(0, 1); right.set_xlabel('share of a step (updates run inside backward where gradients are released)', fontsize=8); right.legend(ncol=4, fontsize=7, frameon=False, loc='lower center', bbox_to_anchor=(.5, 1))
    for ax in (left, right): ax.spines[['top', 'right']].set_visible(False)
    fig.tight_layout(); fig.savefig(ROOT/'docs/bench.png', dpi=110)

head = ['model', 'objective', 'pixels', 'strategy', 'GPUs', 'precision', 'batch per GPU', 'blocks recomputed', 'loop', 's/step', 'planned s', 'error', 'peak GiB', 'planned GiB', 'error', 'MFU', 'HFU', 'tokens/s', 'date']
flow = [r for r in rows if r['model'] != 'bagel']; good = [r for r in flow if not r.get('error') and r.get('step_time') and (r.get('steps_measured') or 3) >= 3]      # a median of fewer says nothing
lines = ['| '+' | '.join(head)+' |', '|'+'---|'*len(head), *map(line, good)]
refused = [(r, made) for r in flow if 'out of memory' in r.get('error', '') and (made := predicted(r)) and made[0] > 139.8]
tried = ['| model | precision | batch per GPU | blocks recomputed | planned GiB | outcome | date |', '|'+'---|'*7, *(f"| {r['model']} | {r['precision']} | {r['micro_batch']} | {r['recompute']} | {made[0]:.1f} | {r['error'].split('. Including')[0].partition(': ')[2]} | {r['date']} |" for r, made in refused)]

def beside():
    "What one would do otherwise, and the fastest run of the same model on as many cards."
    speed = lambda r: r['global_batch']/r['step_time']; ours = lambda r: max((o for o in good if o['loop'] == 'trainer' and (o.get('preset') or 'debug') == 'debug' and not o.get('lora_rank') and o.get('reduce_type', 'fp32') == 'fp32' and o['precision'] == 'bf16-master24' and (o['model'], o['processes']) == (r['model'], r['processes'])), key=speed)
    say = lambda r: f"{speed(r):.2f} samples/s ({r['global_batch']} in {r['step_time']:.3f} s), {r['allocated_gib']:.1f} GiB, MFU {r['mfu']:.3f}"
    name = lambda r: 'a script in the manner of the diffusers examples: accelerate, AdamW, bf16, everything recomputed' if r['loop'] == 'plain' else f"preset `{r['preset']}`: {r['strategy'].upper()}, fp32 masters{', optimizer on the host'*(r['offload'] == 'optimizer')}, not compiled, everything recomputed"
    for r in flow:
        if r['loop'] == 'plain' or r.get('preset', '').startswith('system'):
            o = ours(r); out = say(r) if r.get('step_time') else 'out of memory: weights, gradients and both moments alone take 152 GiB' if 'out of memory' in r['error'] else r['error']
            yield f"| {r['model']} | {r['processes']} | {name(r)} | {out} | {say(o)} | {f'{speed(o)/speed(r):.1f} times' if r.get('step_time') else ''} |"

def scaling(gpus, names):
    "Several cards against one of them, measured on the same machine: samples per second and card."
    last = {r['label']: r for r in flow}; rate = lambda r: r['global_batch']/r['step_time']/r['processes']; base = last['klein-bs4']
    return f'{gpus} GPUs: '+', '.join(f"{what} {rate(r)/rate(base):.1%} ({r['step_time']:.3f} s)" for n, what in names.items() for r in [last[f'klein-fsdp{gpus}{n}']])

WAYS = {'': 'gathered twice, fp32 sums', '-gathered': '`reshard=False`', '-gathered-bf16': '`reshard=False` and gradients summed in bf16'}

def started(r):
    "Where the time until the first step went."
    parts = ', '.join(f'{k} {v:.0f}' for k, v in r['launch'].items() if v > .5)
    return f"{r['first_step_s']:.0f} s on {r['processes']} GPU{'s'*(r['processes'] > 1)}{' with the kernels of an earlier run' if 'warm' in r['label'] else ''} ({parts})"

def bagel():
    "The table of docs/bagel.md."
    yield '| | GPUs | attention | tokens per pack | blocks recomputed | s/step | tokens/s | MFU | peak GiB | planned GiB | error |'; yield '|'+'---|'*11
    for r in rows:
        if r['model'] == 'bagel':
            what = ('LoRA, rank '+str(r['lora_rank']) if r['lora_rank'] else 'full')+f", {r['precision']}, {r['strategy']}"
            yield f"| {what} | {r['processes']} | {'flex' if r['attention'] == 'auto' else r['attention']} | about {round(r['pack_tokens'], -3)//1000}k | {r['recompute']} | {r['step_time']:.3f} ± {r['step_time_spread']:.3f} | {r['tokens_per_second']:.0f} | {r['mfu']:.3f} | {r['allocated_gib']:.1f} | {r['plan_gib']:.1f} | {r['plan_error']:+.1%} |"

versions = ', '.join(f'{k} {v}' for k, v in rows[0]['packages'].items() if v)
(ROOT/'docs/bench.md').write_text(f"""# Measured on GPUs

Full fine-tuning (512 text tokens) and DMD2 distillation (three UNets, generator turn every 10th or 5th step), random weights of the published size, through the trainer (`loop` trainer), through a bare loop with the same
model and optimizer (bare), or as a plain diffusers-style loop would do it (plain). Hardware: {rows[0]['gpus'][0]}, 139.8 GiB each. Versions: {versions}.
MFU counts 3 forward passes of useful work over 989 TFLOP/s; HFU counts recomputation, too. `peak` is allocated memory; `planned` is what `sciftune.strategies.memory` predicts for it, and for the
median step, without a GPU. A distillation's median step is one of the critic alone. ZeRO-3 takes 5.9 GiB that the planner cannot explain, compiled or not.
Offloaded rows have the optimizer's states in host memory, but for as many as fit the given budget, and were held to it by the allocator. Rows of 2026-11-21 were measured before the optimizer's moments got their present units and before the weights of a block were updated in one launch (`strategies.adam`).
FLUX.1: with adapters (rank 16, on the default layers) where the precision is bf16-mixed, full where it is bf16-master24. On torch 2.11 its gradients were no numbers until its single blocks handed cuDNN contiguous ones (`strategies.speed`); `tests/gpu_blocks.py` now finds two blocks
of each kind within 1.1 % of fp32 (full and adapters, eager and compiled), klein's compiled adapters within 0.8 %, Qwen-Image's blocks within 2.5 % (eager and compiled) and its compiled adapters within 4.4 % (all gradients together). FLUX.1's rows, and that of the plain loop of klein, have the digits that were printed; what else they held was lost with the machine, and their versions are those that were installed.

Command of a row: `python scripts/gpu_bench.py OUT model=...,micro_batch=...,recompute=...,num_processes=...`; each row of `docs/bench.jsonl` holds its own.
Rebuild this page with `python scripts/bench_table.py`.

![MFU by batch on one H200, and the parts of a step](bench.png)

What the GPU does in a step, kernel by kernel: [profile.md](profile.md).

""" + '\n'.join(lines) + f"""

## Beside what one would do otherwise
Same cards, random weights; ours is the fastest row above with the precision `bf16-master24` on as many cards. Of system B's recipe one step was measured after the first two (steps 3 and 4 of 4 took 23.9 and 24.7 s;
11.2 s of it the update on the host, with four threads per process), and the command was ended while it shut down; a bare DeepSpeed loop of the same recipe took 14.4 s on such cards.

| model | GPUs | otherwise | measured | ours | ours is faster by |
|---|---|---|---|---|---|
{chr(10).join(beside())}

klein with FSDP2, batch 4, samples per second and GPU against those of one GPU at its best batch, 4 in {[r for r in flow if r['label'] == 'klein-bs4'][-1]['step_time']:.3f} s, all on one machine:

- {scaling(4, WAYS | {'-bf16-reduce': 'gathered twice, bf16 sums'})}
- {scaling(2, WAYS | {'-bf16': 'gathered twice, bf16 sums'})}

Parameters that stay gathered from forward to backward cost as much memory as the blocks have and save a gathering; `reshard='auto'`, the default, keeps them where the plan has room. How many channels NCCL uses makes little
difference: two GPUs, gathered twice, took 1.731 s as they come, 1.730 s with at least 32 (`NCCL_MIN_CTAS=32` before the command of that row), 1.746 s with at most 8 and 1.753 s with at most 4 (`NCCL_MAX_CTAS`; same machine, 2026-11-22).

From the start of the command to the first finished step of Qwen-Image, compiled, weights read from local safetensors: {'; '.join(started(r) for r in flow if r['label'].startswith('launch-'))}.

## Refused, and tried all the same
What the planner says does not fit a card of 139.8 GiB, started with `plan_check=False`.

{chr(10).join(tried)}
""")
page = ROOT/'docs/bagel.md'; text = page.read_text(); first, rest = text.split('<!-- table -->\n', 1); page.write_text(first+'<!-- table -->\n'+'\n'.join(bagel())+'\n<!-- end -->'+rest.split('<!-- end -->', 1)[1])
pictures(); print('\n'.join(lines+tried))
