"""zero_to_bf16.py CHECKPOINT OUT [--max_shard_size 80GB] [--safe_serialization] [--ema] [--dtype bf16]: the trained denoiser of any checkpoint as a diffusers folder."""
import argparse, json
from pathlib import Path
import torch
from sciftune.core.recipe import Recipe
from sciftune.models.family import get_family
from sciftune.training.export import export_component
from sciftune.training.prepare import weights_path
from sciftune.training.unify import Start, export_unified

a = argparse.ArgumentParser(description=__doc__)
a.add_argument('checkpoint', type=Path); a.add_argument('out', type=Path)
a.add_argument('--max_shard_size', default='10GB'); a.add_argument('--dtype', choices=('bf16', 'fp32'), default='bf16')
a.add_argument('--safe_serialization', action='store_true', help='accepted for habit: safetensors is the only format written')
a.add_argument('--ema', action='store_true', help='the moving average instead of the weights')
a = a.parse_args()
recipe = Recipe(**json.loads((a.checkpoint/'info.json').read_text())['recipe']); family = get_family(recipe.model)
base, dtype, state = family.resolve(weights_path(recipe, family), revision=recipe.revision or None), dict(bf16=torch.bfloat16, fp32=torch.float32)[a.dtype], 'ema' if a.ema else 'weight'
if recipe.objective == 'unified':     # one file, in the released layout with its configs, tokenizer and autoencoder
    started = Start(recipe.start_from, recipe.start_from_ema) if recipe.start_from else None
    print(f'{a.out}: {export_unified(a.checkpoint, family, base, a.out, state, dtype, started)} tensors, {a.dtype}')
else:
    count = export_component(a.checkpoint, base/family.denoiser_component, a.out, dtype, a.max_shard_size, state)
    print(f'{a.out}: {sum(count.values())} tensors, {dict(count)}')
