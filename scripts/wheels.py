"""Collects the wheels of sciftune and of all it needs, except torch and what belongs to torch, for another machine's Python."""
import argparse, os, subprocess, sys, tempfile, zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODE = {'torch': '2.99', 'triton': '3.99'}          # the node has its own; empty stand-ins answer for them here, so that gigabytes are not even looked at

def pip(*a, **kw): return subprocess.run([sys.executable, '-m', 'pip', *a], check=True, **kw)

def stand_in(folder, name, version):
    "A wheel with a name and nothing in it."
    info = f'{name}-{version}.dist-info'
    with zipfile.ZipFile(folder/f'{name}-{version}-py3-none-any.whl', 'w') as z:
        z.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
        z.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nGenerator: sciftune\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        z.writestr(f'{info}/RECORD', ''.join(f'{info}/{f},,\n' for f in ('METADATA', 'WHEEL', 'RECORD')))

ap = argparse.ArgumentParser(description=__doc__)
ap.add_argument('folder', type=Path); ap.add_argument('--python', default='3.12', choices=['3.11', '3.12'])
ap.add_argument('--extras', default='fp8,data,track,lab', help='of pyproject.toml, besides deepspeed, which is always there')
args = ap.parse_args()
args.folder.mkdir(parents=True, exist_ok=True); folder = args.folder.resolve()
tags = [*(f'manylinux_2_{n}' for n in range(5, 35)), 'manylinux1', 'manylinux2010', 'manylinux2014', 'linux']
target = ['--python-version', args.python, '--implementation', 'cp', '--only-binary', ':all:', *(x for t in tags for x in ('--platform', f'{t}_x86_64'))]

with tempfile.TemporaryDirectory() as d:
    aside = Path(d)
    for name, version in NODE.items(): stand_in(aside, name, version)
    for old in (*folder.glob('sciftune-*.whl'), *folder.glob('deepspeed-*.whl')): old.unlink()
    pip('wheel', '--quiet', '--no-deps', '--wheel-dir', folder, ROOT)
    pip('wheel', '--quiet', '--no-deps', '--no-build-isolation', '--wheel-dir', folder, 'deepspeed>=0.19.8', env={**os.environ, 'DS_BUILD_OPS': '0'})
    own, deepspeed = (next(folder.glob(f'{n}-*.whl')) for n in ('sciftune', 'deepspeed'))
    asked = f'sciftune[{args.extras}] @ {own.as_uri()}\ndeepspeed @ {deepspeed.as_uri()}\n'
    # uv and not pip: pip answers `python_version == "3.12"` in a requirement for the Python that runs it
    r = subprocess.run([sys.executable, '-m', 'uv', 'pip', 'compile', '--quiet', '--no-header', '--no-annotate', '--python-version', args.python, '--python-platform', 'x86_64-manylinux_2_28',
                        '--only-binary', ':all:', '--find-links', str(aside), '-'], input=asked, capture_output=True, text=True)
    if r.returncode: sys.exit(f'wheelhouse: {r.stderr.strip() or "uv is needed: pip install uv"}')
need = [l for l in r.stdout.split('\n') if '==' in l and l.split('==')[0] not in NODE]
pip('download', '--quiet', '--no-deps', '--dest', folder, *target, *need)
print(f'{len(list(folder.glob("*.whl")))} wheels for Python {args.python} in {folder}; on the node: pip install --no-index --find-links {args.folder.name} "sciftune[deepspeed,{args.extras}]"')
