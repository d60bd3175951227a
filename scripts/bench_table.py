"""bench_table.py: docs/bench.md from docs/bench.jsonl, with the planner's prediction beside each measured peak."""
import json
from pathlib import Path
from sciftune.core.recipe import resolve
from sciftune.strategies.memory import plan

ROOT = Path(__file__).resolve().parent.parent
rows = [json.loads(l) for l in (ROOT/'docs/bench.jsonl').read_text().splitlines()]

def predicted(r):
    "Peak GiB that the planner expects of a measured setting."
    if r['loop'] != 'trainer': return None
    if r.get('plan_error') is not None: return r['allocated_gib']*(1+r['plan_error'])
    auto = r['recompute'] != 'all'
    recipe = resolve(model=r['model'], preset='debug', model_path='random', strategy=r['strategy'], num_processes=r['processes'], precision=r['precision'], micro_batch=r['micro_batch'], resolution=r['resolution'],
                     global_batch=r['global_batch'], compile=r['compile'], gradient_checkpointing='none' if r['recompute'] in (0, '0') else 'full', validation_steps=0, checkpoint_steps=0, held_out=0, device_memory_gib=139.8, host_memory_gib=500)
    return plan(recipe, r['processes'])['run']['allocated_gib'] if r['recompute'] in (0, '0', 'all') else None

planned = lambda p: f'{p:.1f}' if p else ''
error = lambda p, r: f'{p/r["allocated_gib"]-1:+.1%}' if p else ''
lines = ['| model | objective | pixels | strategy | GPUs | precision | batch per GPU | blocks recomputed | loop | s/step | peak GiB | planned GiB | error | MFU | HFU | tokens/s | date |', '|'+'---|'*17]
for r in rows:
    if r.get('error') or not r.get('step_time'): continue
    p = predicted(r); f = lambda k, n=3: f'{r[k]:.{n}f}' if r.get(k) is not None else ''
    lines.append(f"| {r['model']} | {'dmd2' if r['model'] in ('sd15', 'sdxl') else 'flow'}{' + GAN' if 'gan' in r['label'] or 'sdxl' in r['label'] else ''} | {r['resolution']} | {r['strategy']} | {r['processes']} | {r['precision']} | {r['micro_batch']} | {r['recompute']} | {r['loop']} | {f('step_time')} ± {f('step_time_spread')} | {f('allocated_gib', 1)} | "
                 f"{planned(p)} | {error(p, r)} | {f('mfu')} | {f('hfu')} | {f('tokens_per_second', 0)} | {r['date']} |")
versions = ', '.join(f'{k} {v}' for k, v in rows[0]['packages'].items() if v)
(ROOT/'docs/bench.md').write_text(f"""# Measured on GPUs

Full fine-tuning (512 text tokens) and DMD2 distillation (three UNets, generator turn every 10th or 5th step), random weights of the published size, through the trainer (`loop` trainer), through a bare loop with the same
model and optimizer (bare), or as a plain diffusers-style loop would do it (plain). Hardware: {rows[0]['gpus'][0]}, 139.8 GiB each. Versions: {versions}.
MFU counts 3 forward passes of useful work over 989 TFLOP/s; HFU counts recomputation, too. `planned` is what `sciftune.strategies.memory` predicts without a GPU.

Command of a row: `python scripts/gpu_bench.py OUT model=...,micro_batch=...,recompute=...,num_processes=...`; each row of `docs/bench.jsonl` holds its own.
Rebuild this page with `python scripts/bench_table.py`.

""" + '\n'.join(lines) + '\n')
print('\n'.join(lines))
