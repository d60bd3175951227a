"""gpu_bench.py OUT [--run-root DIR] [--plan] SETTING|FILE.yaml ...   one measurement after another; a SETTING is field=value,field=value (see sciftune.lab.bench)."""
import argparse, shutil, sys, time, yaml
from pathlib import Path
from sciftune.core.rundir import write_atomic
from sciftune.lab.bench import bench, setting, table

ap = argparse.ArgumentParser(description=__doc__)
ap.add_argument('out', type=Path); ap.add_argument('settings', nargs='+'); ap.add_argument('--run-root', default='/tmp/bench'); ap.add_argument('--plan', action='store_true'); ap.add_argument('--budget', type=float, default=1e9, help='seconds; no measurement starts later')
args = ap.parse_args()
args.out.mkdir(parents=True, exist_ok=True); began, rows, logs = time.time(), [], []
for s in [x for a in args.settings for x in (yaml.safe_load(open(a)) if a.endswith(('.yaml', '.yml')) else [setting(a)])]:
    if time.time()-began > args.budget: rows.append(dict(label=s.get('label', str(s)), error='not started: out of time')); continue
    try: row = bench(args.run_root, args.plan, args.out/'bench.jsonl', **s)
    except Exception as e: row = dict(label=s.get('label', str(s)), error=f'{type(e).__name__}: {e}')
    rows.append(row); print(f'{time.time()-began:5.0f} s', table([row]).splitlines()[-1], flush=True)
    newest = max(Path(args.run_root).glob('*/log.txt'), key=lambda p: p.stat().st_mtime, default=None)
    if newest: logs.append(f'===== {row["label"]}\n{newest.read_text(errors="replace")[-6000:]}\n'); write_atomic(args.out/'logs.txt', '\n'.join(logs))
write_atomic(args.out/'table.txt', table(rows)+'\n'); print(table(rows))
