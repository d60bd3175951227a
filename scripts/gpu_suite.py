"""gpu_suite.py OUT [--gpus 1|2|4] [--budget SECONDS] [--list] [--tiny] [CASE ...]: measure the named cases, or all of a machine kind, best first, while they fit the time. Rows go to OUT/bench.jsonl, a table to OUT/table.txt.

Not started: a case whose estimate exceeds what is left. --tiny runs the same cases with stand-ins on a CPU: it says that they run, nothing else."""
import argparse, subprocess, sys, time
from pathlib import Path
from sciftune.core.rundir import write_atomic
from sciftune.lab.bench import bench, run_command, table

ROOT = Path(__file__).resolve().parent.parent
def q(**k): return dict(model='qwenimage', precision='bf16-master24', **k)
def k(**f): return dict(model='klein', precision='bf16-master24', **f)
def fsdp(f, n, **more): return f | dict(strategy='fsdp', num_processes=n) | more

# name: (GPUs, estimated seconds, bench fields or a command; {out} is the folder)
CASES = {
    'selftest': (1, 150, [sys.executable, 'tests/gpu_selftest.py']),
    'qwen-70gib': (1, 110, q(offload='optimizer', resident=24.7, device_memory_gib=70, recompute=60)),
    'klein-24gib': (1, 70, k(offload='optimizer', resident=1.7, device_memory_gib=24, recompute=32)),
    'klein-40gib': (1, 60, k(offload='optimizer', resident=16.9, device_memory_gib=40, recompute=32)),
    'qwen-bs4': (1, 100, q(micro_batch=4, recompute=48)),
    'qwen-bs4-offload': (1, 120, q(micro_batch=4, recompute=20, offload='optimizer', resident=6.3)),
    'qwen-bs2-offload': (1, 100, q(micro_batch=2, recompute=0, offload='optimizer', resident=29.8)),
    'qwen-bs2': (1, 80, q(micro_batch=2, recompute=29)),
    'plain-klein': (1, 60, k(loop='plain', steps=10) | dict(precision='bf16')),
    'plain-klein4b-mixed': (1, 60, dict(model='klein4b', loop='plain', precision='bf16-mixed', steps=10)),
    'plain-qwen': (1, 60, q(loop='plain', steps=10) | dict(precision='bf16')),
    'launch-klein': (1, 120, k(files='/tmp/bench/weights-klein', recompute=0, steps=3)),
    'launch-qwen': (1, 200, q(files='/tmp/bench/weights-qwenimage', recompute=60, steps=3)),
    'precision': (1, 420, [sys.executable, '-m', 'papermill', 'nbs/experiments/precision.ipynb', '{out}/precision.ipynb', '-p', 'size', 'small', '-p', 'steps', '300', '-p', 'cpu', 'False', '-p', 'precisions', 'fp32,bf16-mixed,bf16-master24,fp8,bf16']),
    'profile': (1, 150, [sys.executable, 'scripts/gpu_profile.py', '{out}/profile', '--model', 'qwenimage']),
    'klein-fsdp2': (2, 80, fsdp(k(micro_batch=3, recompute=0), 2)),
    'qwen-fsdp2': (2, 90, fsdp(q(micro_batch=2, recompute=30), 2)),
    'system-a-2': (2, 90, dict(model='klein', preset='system_a', num_processes=2, global_batch=2, steps=10)),
    'qwen-fsdp4': (4, 100, fsdp(q(micro_batch=2, recompute=0), 4)),
    'qwen-fsdp4-prefetch2': (4, 80, fsdp(q(micro_batch=2, recompute=0), 4, prefetch=2)),
    'qwen-fsdp4-bf16-reduce': (4, 80, fsdp(q(micro_batch=2, recompute=0), 4, reduce_type='bf16')),
    'klein-fsdp4': (4, 80, fsdp(k(micro_batch=4, recompute=0), 4)),
    'klein-fsdp4-bf16-reduce': (4, 80, fsdp(k(micro_batch=4, recompute=0), 4, reduce_type='bf16')),
    'klein-fsdp4-gathered': (4, 80, fsdp(k(micro_batch=4, recompute=0), 4, reshard=False)),
    'klein-fsdp4-gathered-bf16': (4, 80, fsdp(k(micro_batch=4, recompute=0), 4, reshard=False, reduce_type='bf16')),
    'klein-zero3': (4, 80, dict(model='klein', strategy='zero3', num_processes=4, precision='bf16-mixed', recompute=32)),
    'klein-fsdp4-bs1': (4, 70, fsdp(k(recompute=32), 4)),
    'klein-fsdp4-prefetch2': (4, 80, fsdp(k(micro_batch=4, recompute=0), 4, prefetch=2)),
    'system-a': (4, 90, dict(model='klein', preset='system_a', num_processes=4, steps=10)),
    'system-b': (4, 290, dict(model='qwenimage', preset='system_b', num_processes=4, global_batch=8, steps=6)),
    'launch-qwen4': (4, 170, fsdp(q(files='/tmp/bench/weights-qwenimage', recompute=0, steps=3), 4)),
}
TINY = dict(model_path='tiny', resolution=64, text_tokens=32, figures=16, steps=5, cpu=True, compile=False)

def small(fields):
    "The same case with a stand-in on a CPU."
    f = {a: b for a,b in fields.items() if a not in ('device_memory_gib', 'files')} | TINY; n = min(2, f.get('num_processes', 1)); b = f.get('micro_batch', 1)
    return f | dict(num_processes=n, global_batch=n*b) | {a: min(1, f[a]) for a in ('recompute', 'resident') if a in f}

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('out', type=Path); ap.add_argument('cases', nargs='*'); ap.add_argument('--gpus', type=int, default=1); ap.add_argument('--budget', type=float, default=1e9); ap.add_argument('--run-root', default='/tmp/bench')
    ap.add_argument('--list', action='store_true'); ap.add_argument('--tiny', action='store_true')
    a = ap.parse_args(); names = a.cases or [n for n, c in CASES.items() if c[0] == a.gpus]
    if wrong := [n for n in names if n not in CASES]: sys.exit(f"no case {', '.join(wrong)}; known: {', '.join(CASES)}")
    if a.list: return print('\n'.join(f'{n:24} {CASES[n][0]} GPUs {CASES[n][1]:4} s  {CASES[n][2]}' for n in names)+f'\n{sum(CASES[n][1] for n in names)} s in all')
    a.out.mkdir(parents=True, exist_ok=True); began, rows = time.time(), []
    for n in names:
        left, (_, estimate, what) = a.budget-(time.time()-began), CASES[n]
        if estimate > left: rows.append(dict(label=n, error=f'not started: needs about {estimate} s, {left:.0f} s are left')); continue
        try:
            if isinstance(what, list):
                code = run_command([w.replace('{out}', str(a.out.resolve())) for w in what], {'PYTHONPATH': str(ROOT)}, a.out/f'{n}.txt', min(left, 2*estimate)); row = dict(label=n) | (dict(error=f'exit code {code}, see {n}.txt') if code else {})
            else: row = bench(a.run_root, table=a.out/'bench.jsonl', label=n, **({'timeout': int(min(left, 2*estimate))} | (small(what) if a.tiny else what)))
        except Exception as e: row = dict(label=n, error=f'{type(e).__name__}: {e}')
        rows.append(row); print(f"{time.time()-began:5.0f} s (estimate {estimate} s)  {table([row]).splitlines()[-1]}", flush=True)
        if row.get('launch'): print('        '+', '.join(f'{s} {t:.1f}' for s, t in row['launch'].items()), flush=True)
    text = table(rows); write_atomic(a.out/'table.txt', text+'\n'); print(text)

if __name__ == '__main__': main()
