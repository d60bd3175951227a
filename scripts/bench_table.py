"""bench_table.py: docs/bench.md and docs/bench.png from docs/bench.jsonl, with the planner's memory and time beside what was measured."""
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
    return ' | '.join(['', r['model'], kind, f"{r['resolution']}", r['strategy']+(f", {r['offload']} offloaded, {r['device_memory_gib']:g} GiB" if r.get('offload', 'none') != 'none' else ''), f"{r['processes']}", r['precision'], f"{r['micro_batch']}", f"{r['recompute']}", r['loop'],
                       f"{f('step_time')} ± {f('step_time_spread')}", *time, f('allocated_gib', 1), *memory, f('mfu'), f('hfu'), f('tokens_per_second', 0), r['date'], '']).strip()

def pictures():
    "MFU by batch, and where the time of a step goes: docs/bench.png."
    good = [r for r in rows if r.get('step_time') and not r.get('error') and r['loop'] == 'trainer' and r['model'] in ('qwenimage', 'klein', 'flux1') and r['strategy'] == 'single' and r.get('offload', 'none') == 'none']
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1, 1.3)); kind = lambda r: f"{r['model']}, {'LoRA' if r.get('lora_rank') else r['precision'].removeprefix('bf16-')}"
    for k in sorted({kind(r) for r in good}):
        best = {b: max(r['mfu'] for r in good if kind(r) == k and r['micro_batch'] == b) for b in sorted({r['micro_batch'] for r in good if kind(r) == k})}
        left.plot(list(best), list(best.values()), 'o-', label=k)
    left.set_xlabel('batch per GPU'); left.set_ylabel('MFU, best setting'); left.set_xticks(sorted({r['micro_batch'] for r in good})); left.set_ylim(bottom=0); left.legend(fontsize=8, frameon=False)
    bars = [r for r in good if r.get('backward_time')]; names = [f"{kind(r)}, batch {r['micro_batch']}, {r['recompute']} recomputed" for r in bars]; from_ = [0.0]*len(bars)
    for part, c in dict(forward='C0', backward='C1', optimizer='C2').items():
        width = [r.get(f'{part}_time', 0)/r['step_time'] for r in bars]; right.barh(range(len(bars)), width, left=from_, color=c, label=part); from_ = [a+b for a, b in zip(from_, width)]
    right.barh(range(len(bars)), [max(0, 1-a) for a in from_], left=from_, color='.85', label='rest'); right.set_yticks(range(len(bars)), names, fontsize=7); right.invert_yaxis(); right.set_xlim(0, 1); right.set_xlabel('share of a step (updates run inside backward where gradients are released)', fontsize=8); right.legend(ncol=4, fontsize=7, frameon=False, loc='lower center', bbox_to_anchor=(.5, 1))
    for ax in (left, right): ax.spines[['top', 'right']].set_visible(False)
    fig.tight_layout(); fig.savefig(ROOT/'docs/bench.png', dpi=110)

head = ['model', 'objective', 'pixels', 'strategy', 'GPUs', 'precision', 'batch per GPU', 'blocks recomputed', 'loop', 's/step', 'planned s', 'error', 'peak GiB', 'planned GiB', 'error', 'MFU', 'HFU', 'tokens/s', 'date']
lines = ['| '+' | '.join(head)+' |', '|'+'---|'*len(head), *(line(r) for r in rows if not r.get('error') and r.get('step_time'))]
refused = [(r, made) for r in rows if 'out of memory' in r.get('error', '') and (made := predicted(r))[0] > 139.8]
tried = ['| model | precision | batch per GPU | blocks recomputed | planned GiB | outcome | date |', '|'+'---|'*7, *(f"| {r['model']} | {r['precision']} | {r['micro_batch']} | {r['recompute']} | {made[0]:.1f} | {r['error'].split('. Including')[0].partition(': ')[2]} | {r['date']} |" for r, made in refused)]
versions = ', '.join(f'{k} {v}' for k, v in rows[0]['packages'].items() if v)
(ROOT/'docs/bench.md').write_text(f"""# Measured on GPUs

Full fine-tuning (512 text tokens) and DMD2 distillation (three UNets, generator turn every 10th or 5th step), random weights of the published size, through the trainer (`loop` trainer), through a bare loop with the same
model and optimizer (bare), or as a plain diffusers-style loop would do it (plain). Hardware: {rows[0]['gpus'][0]}, 139.8 GiB each. Versions: {versions}.
MFU counts 3 forward passes of useful work over 989 TFLOP/s; HFU counts recomputation, too. `peak` is allocated memory; `planned` is what `sciftune.strategies.memory` predicts for it, and for the
median step, without a GPU. A distillation's median step is one of the critic alone. ZeRO-3 with compiled blocks takes 5.9 GiB that the planner cannot explain.
Offloaded rows have the optimizer's states in host memory, but for as many as fit the given budget, and were held to it by the allocator. Rows before 2026-11-22 were measured before the optimizer's moments got their present units (`strategies.adam`), which adds a few instructions per weight.
FLUX.1: with adapters (rank 16, on the default layers) where the precision is bf16-mixed, full where it is bf16-master24. On torch 2.11 its gradients were no numbers until its single blocks handed cuDNN contiguous ones (`strategies.speed`); `tests/gpu_blocks.py` now finds two blocks
of each kind within 1.1 % of fp32 (full: eager and compiled; adapters: eager). Rows of 2026-11-22 have the digits that were printed; what else a row holds was lost with the machine, and its versions are those that were installed.

Command of a row: `python scripts/gpu_bench.py OUT model=...,micro_batch=...,recompute=...,num_processes=...`; each row of `docs/bench.jsonl` holds its own.
Rebuild this page with `python scripts/bench_table.py`.

![MFU by batch on one H200, and the parts of a step](bench.png)

What the GPU does in a step, kernel by kernel: [profile.md](profile.md).

""" + '\n'.join(lines) + f"""

## Refused, and tried all the same
What the planner says does not fit a card of 139.8 GiB, started with `plan_check=False`.

{chr(10).join(tried)}
""")
pictures(); print('\n'.join(lines+tried))
