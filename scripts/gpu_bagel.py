"""gpu_bagel.py OUT [--tokens N] [--layers N] [--tiny]: BAGEL's attention, flex against dense, on one GPU: the kernel alone on a mixed pack at 7B shapes, then a model of a few layers of real width.
Equality of outputs and gradients, times, memory. --tiny: small shapes and forward only, to try the path on a CPU. Whole runs: scripts/gpu_bench.py with scripts/bench_bagel*.yaml."""
import argparse, json, time
from dataclasses import asdict
from pathlib import Path
import torch
from sciftune.data.sequences import Packer, Rules, SpecialTokens, add_sample, finish, item
from sciftune.models.bagel import TINY, Bagel, BagelConfig, DenseAttention, FlexAttention, block_mask, forward_flops, sample_masks, visibility

ap = argparse.ArgumentParser(description=__doc__)
ap.add_argument('out', type=Path); ap.add_argument('--tokens', type=int, default=10240); ap.add_argument('--layers', type=int, default=2); ap.add_argument('--tiny', action='store_true')
args = ap.parse_args(); args.out.mkdir(parents=True, exist_ok=True)
device = 'cpu' if args.tiny else 'cuda'; cuda = device == 'cuda'; dtype = torch.bfloat16 if cuda else torch.float32
config = BagelConfig(**TINY, vocab_size=256) if args.tiny else BagelConfig(layers=args.layers)
tokens = 400 if args.tiny else args.tokens; special = SpecialTokens(250, 251, 252, 253) if args.tiny else SpecialTokens(); rules = Rules.of(config, special); rows = []

def pack():
    "Samples to draw, to change and to ask about, until there are `tokens`."
    g, p, big, small = torch.Generator().manual_seed(0), Packer(rules), (2 if args.tiny else 44)*16, (2 if args.tiny else 28)*14
    words = lambda n: torch.randint(0, 200, (n,), generator=g).tolist(); pixels = lambda side: torch.randn(3, side, side, generator=g).clamp(-1, 1)
    noise = lambda n: lambda count: torch.randn(2, count, rules.latent_size, generator=g)
    draw, see, clean, ask, say = item('vae_image', True), item('vit_image'), item('vae_image'), item('text'), item('text', True); short, long = (4, 9) if args.tiny else (30, 220)
    while p.at < tokens:
        for plan, texts, images in (([ask, draw], [words(long)], [pixels(big)]), ([clean, see, ask, draw], [words(short)], [pixels(big), pixels(small), pixels(big)]), ([see, ask, say], [words(short), words(long)], [pixels(small)])):
            if p.at < tokens: add_sample(p, plan, texts, images, [True]*len(plan), torch.randn(len(plan), generator=g).tolist(), noise)
    batch = finish(p); batch['vit_token_seqlens'] = batch['vit_token_seqlens'].tolist(); del batch['padded_images']
    batch['packed_vae_tokens'] = torch.randn(len(batch['packed_vae_token_indexes']), rules.latent_size, generator=g)
    return batch

def timed(f, n=5):
    "Result, seconds per call after two warm-up calls, GiB above what was there."
    for _ in range(2 if cuda else 0): f()
    if cuda: torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    for _ in range(n if cuda else 1): out = f()
    if cuda: torch.cuda.synchronize()
    return out, (time.perf_counter()-began)/(n if cuda else 1), (torch.cuda.max_memory_allocated()-before)/2**30 if cuda else 0.0

def say(**row): rows.append(row); print('  '.join(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}' for k,v in row.items()), flush=True)
def far(a, b): return max(float((x.float()-y.float()).norm()/x.float().norm().clamp_min(1e-12)) for x, y in zip(a, b))

batch = pack(); lens, splits, modes = batch['sample_lens'], batch['split_lens'], batch['attn_modes']; length = sum(lens); padded = length+(-length)%128
say(what='pack', tokens=length, samples=len(lens), text=len(batch['packed_text_indexes']), seen=len(batch['packed_vit_token_indexes']), latents=len(batch['packed_vae_token_indexes']))
rule = visibility([*lens, padded-length], [*splits, padded-length], [*modes, 'causal'], device) if padded > length else visibility(lens, splits, modes, device)
mask, seconds, gib = timed(lambda: block_mask(rule, padded, device)); say(what='block mask', seconds=seconds, gib=gib, sparsity=float(mask.sparsity()))

torch.manual_seed(0); q, k, v = (torch.randn(length, h, config.head_dim, device=device, dtype=dtype, requires_grad=cuda) for h in (config.heads, config.kv_heads, config.kv_heads))
def attention(f):
    out = f(0, q, k, v)
    return (out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))) if cuda else (out,)
dense, t_dense, m_dense = timed(lambda f=DenseAttention(sample_masks(lens, splits, modes, device)): attention(f)); flex, t_flex, m_flex = timed(lambda f=FlexAttention(lens, splits, modes, device): attention(f))
say(what='attention, one layer', dense=t_dense, flex=t_flex, dense_gib=m_dense, flex_gib=m_flex, difference=far(dense, flex))
assert far(dense, flex) < (2e-2 if cuda else 1e-5)

model = Bagel().random_denoiser(config, dtype, device); torch.nn.init.normal_(model.llm2vae.weight, std=.02); model.enable_gradient_checkpointing(); batch = batch.to(device)
def step(kind):
    model.attention = kind; model.zero_grad()
    with torch.set_grad_enabled(cuda):
        out = model(batch); loss = out.ce.mean()+out.mse.mean()
        if cuda: loss.backward()
    return (out.ce.detach(), out.mse.detach(), *(p.grad.clone() for n, p in model.named_parameters() if cuda and p.grad is not None and 'layers.0.' in n and 'vit' not in n))
dense, t_dense, m_dense = timed(lambda: step('dense')); flex, t_flex, m_flex = timed(lambda: step('flex')); flops = 3*forward_flops(config, [*lens, padded-length])
say(what=f'model of {config.layers} layers, forward'+' and backward'*cuda, dense=t_dense, flex=t_flex, dense_gib=m_dense, flex_gib=m_flex, difference=far(dense, flex), flex_tflops=flops/t_flex/1e12, dense_tflops=flops/t_dense/1e12)
assert far(dense, flex) < (5e-2 if cuda else 1e-4)
(args.out/'gpu_bagel.json').write_text(json.dumps(dict(device=torch.cuda.get_device_name() if cuda else 'cpu', torch=torch.__version__, config=asdict(config), rows=rows), indent=1))
