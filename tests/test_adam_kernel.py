"""The optimizer's kernel, in Triton's interpreter on the CPU, against its definition in double precision."""
import os, subprocess, sys
import pytest

CODE = '''
import torch
import torch.nn.functional as F
from sciftune.strategies.adam import UNIT, update, programs

def groups(t): return F.pad(t, (0, -len(t) % 32)).view(-1, 32)
def half(w): return torch.ldexp(torch.ones(len(w)), torch.frexp(w.float())[1]-9).double()      # of the last place
def encode(m, r):
    "Codes and fp16 scales of both moments."
    gm, gr = groups(m), groups(r); sm, sr = gm.abs().amax(1).clamp(1e-12, 65504/UNIT), gr.amax(1).clamp(1e-12, 65504/UNIT)
    y = gm/sm[:, None]
    return (2*y/(1+y.abs())*127).round().view(-1)[:len(m)], (sm*UNIT).half(), torch.maximum(gr/sr[:, None]*255, (gr > 0).double()).round().view(-1)[:len(m)], (sr*UNIT).half()
def decode(q, s, k, t):
    y, wide = q/127, lambda s: s.double().repeat_interleave(32)[:len(q)]/UNIT
    return y/(2-y.abs())*wide(s), k/255*wide(t)

torch.manual_seed(0); lr, betas, eps, wd = 1e-3, (.9, .99), 1e-8, .1
for n, size in ((32, .01), (1000, .01), (2500, .01), (1000, 1e-7)):
    w = (torch.randn(n)*.02).bfloat16(); c = torch.zeros(n, dtype=torch.int8)
    m, v, ms, vs = torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n//32), dtype=torch.float16), torch.zeros(-(-n//32), dtype=torch.float16)
    squares = torch.zeros(programs(n, 1)); exact, em, ev = w.double(), torch.zeros(n).double(), torch.zeros(n).double()
    for step in range(1, 6):
        g = (torch.randn(n)*size).bfloat16(); d = g.double(); x = w.double()+c.double()/127*half(w); dm, dr = decode(m.double(), ms, v.double(), vs)
        dm, dv = betas[0]*dm+(1-betas[0])*d, betas[1]*dr*dr+(1-betas[1])*d*d
        x = x*(1-lr*wd) - lr*(dm/(1-betas[0]**step))/((dv/(1-betas[1]**step)).sqrt()+eps)
        qm, sm, qv, sv = encode(dm, dv.sqrt())
        update(w, c, m, ms, v, vs, g, squares, step, lr, betas, eps, wd)
        got = w.double()+c.double()/127*half(w); assert (got-x).abs().max() <= 1.01*(half(w)/254).max(), (n, step, (got-x).abs().max())
        assert ((got-x).abs() <= half(w)/127).all(), 'never more than one code away'
        for a, b in ((m, qm), (v, qv)): assert (a.double()-b).abs().max() <= 1 and (a.double() != b).double().mean() < .01
        for a, b in ((ms, sm), (vs, sv)): assert torch.allclose(a.double(), b.double(), rtol=2**-9, atol=1e-7)
        assert abs(squares.sum()/d.square().sum()-1) < 1e-5
        em, ev = betas[0]*em+(1-betas[0])*d, betas[1]*ev+(1-betas[1])*d*d
        exact = exact*(1-lr*wd) - lr*(em/(1-betas[0]**step))/((ev/(1-betas[1]**step)).sqrt()+eps)
    assert (got-exact).abs().mean() < .1*lr and (w.double()-exact).abs().mean() < 5*lr

# gradients of a large model, some weights with a thousandth of their neighbours': the updates stay those of AdamW
n, lr, betas = 512, 1e-5, (.9, .999); g = torch.Generator().manual_seed(0); w = torch.randn(n, generator=g).bfloat16()*.02; first = w.double(); c = torch.zeros(n, dtype=torch.int8)
m, v, ms, vs = torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8), torch.zeros(n//32, dtype=torch.float16), torch.zeros(n//32, dtype=torch.float16)
squares, em, ev, moved = torch.zeros(programs(n, 1)), torch.zeros(n).double(), torch.zeros(n).double(), torch.zeros(n).double(); small = torch.arange(n) % 32 == 0; mean = torch.randn(n, generator=g)
for step in range(1, 41):
    d = ((torch.randn(n, generator=g)+mean)*torch.where(small, 1e-9, 1e-6)).bfloat16(); update(w, c, m, ms, v, vs, d, squares, step, lr, betas, 1e-12, 0.0)
    em, ev = .9*em+.1*d.double(), .999*ev+.001*d.double().square(); moved -= lr*em/(1-.9**step)/((ev/(1-.999**step)).sqrt()+1e-12)
got = w.double()+c.double()/127*half(w)-first
assert ((got-moved)[~small].norm()/moved[~small].norm()) < .03, (got-moved).norm()/moved.norm()
assert got[small].abs().max() < 40*lr, 'a small gradient never means a long step'

# too large for the scales: a step of the usual length; no number: seen in the weight
for value in (1e4, float('nan')):
    w = torch.full((64,), .5).bfloat16(); c = torch.zeros(64, dtype=torch.int8); m, v, ms, vs = torch.zeros(64, dtype=torch.int8), torch.zeros(64, dtype=torch.uint8), torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.float16)
    for step in (1, 2, 3): update(w, c, m, ms, v, vs, torch.full((64,), value).bfloat16(), squares[:1], step, .01, (.9, .99), 1e-8, 0.0)
    assert w.isnan().all() if value != value else (w.double()-.5).abs().max() < .05 and (w.double() < .49).all(), (value, w[:4])
print('fine')
'''

def test_kernel_equals_its_definition():
    pytest.importorskip('triton'); pytest.importorskip('flashoptim')
    r = subprocess.run([sys.executable, '-c', CODE], capture_output=True, text=True, env={**os.environ, 'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'})
    assert r.returncode == 0 and 'fine' in r.stdout, r.stderr[-3000:]
