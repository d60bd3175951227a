"""The optimizer's kernel, in Triton's interpreter on the CPU, against its definition in double precision."""

import os
import subprocess
import sys

import pytest

CODE = """
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
"""

TOGETHER = """
import torch
from torch import nn
from sciftune.strategies.adam import LeanAdamW, Moment
from sciftune.strategies.gradient_release import GradientRelease

def optimizer(params):
    "It asks for a GPU; the interpreter needs none."
    there = torch.cuda.is_available; torch.cuda.is_available = lambda: True
    try: return LeanAdamW(params, lr=1e-3, weight_decay=.1, master_weight_bits=24)
    finally: torch.cuda.is_available = there
def tensors(opt, p): s = opt.state[p]; return [p.detach(), s['error_bits'], *(t for k in ('exp_avg', 'exp_avg_sq') for t in (s[k]._quantized, s[k]._scales)), s['step']]
def same(opts, params): return all(torch.equal(x, y) for p, q in zip(*params) for x, y in zip(tensors(opts[0], p), tensors(opts[1], q)))
def parameters(sizes): torch.manual_seed(0); return [nn.Parameter((torch.randn(n)*.02).bfloat16()) for n in sizes]
def plan(): return next(iter(one.launches.values()))
def step(gs):
    "Together and one by one."
    one.step_params(a, gs, one.param_groups[0])
    for q, q.grad in zip(b, gs): two.step_param(q, two.param_groups[0])
    assert same((one, two), (a, b)) and torch.equal(one.partial, two.partial) and torch.equal(one.take_squares(), two.take_squares()) and all(p.grad is None for p in a)

# the numbers of the kernel for one tensor, bit by bit: several blocks, more than there are programs, a part of a block; sizes that go alone; nothing at all, as of an empty shard
sizes = (32, 1024, 2500, 40960, 7, 1040, 0, 16); a, b = parameters(sizes), parameters(sizes); one, two = optimizer(a), optimizer(b)
grads = [(torch.randn(n)*.01).bfloat16() for n in sizes]; step(grads)
assert plan().fits == [0, 1, 3, 5, 7] and len(plan().rows) == 1+1+8+2+1 and int(one.state[a[0]]['step']) == 1

# the table is sent again when something has moved, the plan made again when a state is another one
first, table = plan(), plan().table; step(grads); assert plan() is first and plan().table is table
grads[3] = grads[3].clone(); step(grads); assert plan() is first and plan().table is not table; table = plan().table; step(grads); assert plan().table is table
for o, ps in ((one, a), (two, b)):
    s = o.state[ps[1]]; s['error_bits'] = s['error_bits']+1; s['exp_avg']._scales = s['exp_avg']._scales*2; ps[0].data = ps[0].data*2
step(grads); assert plan() is first and plan().table is not table
for o, ps in ((one, a), (two, b)):
    for p in ps: o.state[p]['step'] = torch.full_like(o.state[p]['step'], 9)                 # what reading a checkpoint does
step(grads); assert plan() is not first and int(one.state[a[0]]['step']) == 10
m = one.state[a[0]]['exp_avg']; new = one.state[a[0]]['exp_avg'] = Moment(None); new._quantized, new._scales = m._quantized.clone(), m._scales.clone(); step(grads)
whole = torch.zeros(40976).bfloat16(); off = whole[8:40968]; off.copy_(grads[3]); grads[3] = whole[1:40961].copy_(off.clone()); step(grads); assert 3 not in plan().fits, 'an address that 16 does not divide'

# gradients in fp32, only those that the kernel takes
one.step_params([a[3], a[1]], [grads[3].float(), grads[1].float()], one.param_groups[0])
for i in (3, 1): b[i].grad = grads[i].clone(); two.step_param(b[i], two.param_groups[0])
assert same((one, two), (a, b)) and len(one.launches) == 2; one.take_squares(); two.take_squares()
for o, ps in ((one, a), (two, b)):
    for p in ps: o.state[p]['step'] = torch.full_like(o.state[p]['step'], 9)

# one of them has taken more steps: one by one
for o, ps in ((one, a), (two, b)): o.state[ps[0]]['step'] += 1
step(grads); assert (int(one.state[a[0]]['step']), int(one.state[a[1]]['step'])) == (int(one.state[a[1]]['step'])+1, int(two.state[b[1]]['step']))

# a module: two blocks, and a layer outside of them
def module():
    torch.manual_seed(0); m = nn.Module(); m.outer, m.blocks = nn.Linear(32, 32), nn.ModuleList([nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(2)]); return m.bfloat16()
def run(blocks, steps=3):
    m = module(); opt = optimizer(list(m.parameters())); rel = GradientRelease(m, opt, .1, blocks); x, norms, calls = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).bfloat16(), [], []
    known = opt.step_params; opt.step_params = lambda ps, gs, g: (calls.append(len(ps)), known(ps, gs, g))
    for _ in range(steps):
        y = m.outer(x)
        for block in m.blocks: y = block(y) if block is m.blocks[0] else block[1](block[0](y))          # the last two layers of the second get no gradient
        (y.float().square().mean()*rel.scale).backward(); norms.append(rel.finish()); assert all(p.grad is None for p in m.parameters())
    return opt, list(m.parameters()), torch.stack(norms), calls
(one, a, n1, calls), (two, b, n2, alone) = run(None), run([])
assert same((one, two), ([p for p in a if one.state[p]], [p for p in b if two.state[p]])) and torch.equal(n1, n2) and (n1 > 0).all() and calls == [8, 4, 4, 8, 4, 8] and not alone, (n1, n2, calls)
print('fine')
"""


def run(code):
    pytest.importorskip("triton")
    pytest.importorskip("flashoptim")
    r = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert r.returncode == 0 and "fine" in r.stdout, r.stderr[-3000:]


def test_kernel_equals_its_definition():
    run(CODE)


def test_one_launch_is_the_updates_one_by_one():
    run(TOGETHER)
