"""gate.py sync: bring what is generated into step with the notebooks. gate.py check: say what is out of step, before any test runs."""
import ast, json, os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = dict(core=0, data=1, models=2, losses=3, strategies=3, training=4, lab=5)
LAUNCHES = {('lab/launch.py', 'training')}               # the ranks of launcher='notebook', imported inside the fork only
TORCH_FREE = 'core.recipe core.rundir core.engineconf data.samples data.figures lab.plots lab.report lab.launch lab.bench lab.distillation data.buckets data.captions'.split()
LARGEST = 300_000                                        # bytes of a notebook

def tool(*command, cwd): subprocess.run([sys.executable, *command], cwd=cwd, check=True, env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdout=subprocess.DEVNULL)

def readme(root):
    "README.md from the cells of index.ipynb: prose, fenced examples, and the text of their outputs."
    parts = ['<!-- Generated from nbs/index.ipynb by scripts/readme. -->']
    for c in json.loads((root/'nbs/index.ipynb').read_text())['cells']:
        source = ''.join(c['source'])
        if c['cell_type'] == 'markdown': parts.append(source)
        elif c['cell_type'] == 'code':
            if not source.startswith('#| hide'): parts.append(f'```python\n{source}\n```')
            for o in c['outputs']:
                data = o.get('data', {})
                parts.append(''.join(data['text/markdown']) if 'text/markdown' in data else '```\n' + ''.join(o.get('text', data.get('text/plain', ''))).rstrip() + '\n```')
    (root/'README.md').write_text('\n\n'.join(p.strip() for p in parts)+'\n')

def sync(root):
    tool('-m', 'nbconvert', '--log-level', 'ERROR', '--to', 'notebook', '--execute', '--inplace', 'nbs/index.ipynb', cwd=root)
    for command in ('nbdev_clean', 'nbdev_export'): tool('-c', f'from nbdev.{dict(nbdev_clean="clean", nbdev_export="doclinks")[command]} import {command}; {command}()', cwd=root)
    readme(root)
    shutil.copy(root/'nbs/launch.ipynb', root/'sciftune/lab/launch.ipynb')

def files(root):
    "Files of the work tree that git knows or would take."
    names = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard', '-z'], cwd=root, capture_output=True, text=True, check=True).stdout.split('\0')
    return sorted(n for n in names if n and (root/n).is_file())

def out_of_step():
    "The files that `sync` would change, tried on a copy."
    with tempfile.TemporaryDirectory() as d:
        copy = Path(d)/'copy'
        for n in files(ROOT): (copy/n).parent.mkdir(parents=True, exist_ok=True); shutil.copy(ROOT/n, copy/n)
        before = {n: (copy/n).read_bytes() for n in files(ROOT)}
        sync(copy)
        after = {str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob('*') if p.is_file() and '__pycache__' not in p.parts}
        return [f'{n} is out of step with its notebook: run scripts/readme and commit' for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)]

def imports(path):
    "Floors that a module imports from, at any depth."
    here = path.relative_to(ROOT/'sciftune').parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ['sciftune', *here[:-1]][:len(here)+1-node.level] if node.level else []
            module = '.'.join([*base, *([node.module] if node.module else [])])
            names = [f'{module}.{a.name}' for a in node.names]
        else: continue
        yield from (n.split('.')[1] for n in names if n.startswith('sciftune.') and n.split('.')[1] in FLOORS)

def wrong_floors():
    for path in sorted((ROOT/'sciftune').glob('*/*.py')):
        name, floor = str(path.relative_to(ROOT/'sciftune')), path.parent.name
        for other in sorted(set(imports(path))):
            allowed = other == floor or (other == 'core' if floor == 'lab' else FLOORS[other] < FLOORS[floor])
            if not allowed and (name, other) not in LAUNCHES: yield f'sciftune/{name} imports from the floor {other}, which is not below {floor}'

def orphans():
    for path in sorted((ROOT/'sciftune').glob('**/*.py')):
        if path.name in ('__init__.py', '_modidx.py'): continue
        m = re.search(r'File to edit: (\S+?)\.$', path.read_text(), re.M)
        if not m: yield f'{path.relative_to(ROOT)} is not generated from a notebook'
        elif not (path.parent/m[1]).resolve().exists(): yield f'{path.relative_to(ROOT)}: its notebook {m[1]} is gone; delete the module'

def bad_notebooks():
    for path in sorted((ROOT/'nbs').glob('**/*.ipynb')):
        if '.ipynb_checkpoints' in path.parts: continue
        name, nb = path.relative_to(ROOT), json.loads(path.read_text())
        if path.stat().st_size > LARGEST: yield f'{name} has {path.stat().st_size} bytes, more than {LARGEST}'
        if 'name' not in nb['metadata'].get('kernelspec', {}): yield f'{name} has lost its kernelspec; papermill needs it'
        outputs = json.dumps([c['outputs'] for c in nb['cells'] if c['cell_type'] == 'code'])
        if 'image/svg+xml' in outputs: yield f'{name} has an SVG output, which differs from run to run'
        if m := re.search(r'/(?:tmp|home|root)/\w+', outputs): yield f'{name} has a path of one machine in an output: {m[0]}'
    cells = json.loads((ROOT/'nbs/launch.ipynb').read_text())['cells']
    if sum('parameters' in c['metadata'].get('tags', []) for c in cells) != 1: yield 'nbs/launch.ipynb needs exactly one cell tagged parameters'
    if any(c.get('outputs') for c in cells): yield 'nbs/launch.ipynb is kept without outputs'

def heavy():
    code = 'import importlib, sys\nfor m in sys.argv[1:]:\n    importlib.import_module("sciftune."+m)\n    if "torch" in sys.modules: sys.exit(f"sciftune.{m} imports torch")'
    r = subprocess.run([sys.executable, '-c', code, *TORCH_FREE], cwd=ROOT, capture_output=True, text=True)
    if r.returncode: yield r.stderr.strip().splitlines()[-1]

def check():
    problems = [*orphans(), *wrong_floors(), *bad_notebooks(), *heavy(), *out_of_step()]
    for p in problems: print(f'gate: {p}', file=sys.stderr)
    return 1 if problems else 0

if __name__ == '__main__': sys.exit(check() if sys.argv[1:] == ['check'] else sync(ROOT) if sys.argv[1:] == ['sync'] else 'gate.py sync | check')
