"""Distillation through the trainer: engines against one process, exact resume, one teacher.

Four processes and the rarer settings: pytest -m slow tests/processes/test_distill.py
"""

import gc
import json
import os

import forked
import pytest
import torch
import torch.multiprocessing as mp
from forked import losses, wait
from small_unets import small_unet

from sciftune.core.checkpoint_folders import check_same_run
from sciftune.core.plan import Plan
from sciftune.core.recipe import RecipeError, resolve, restored
from sciftune.core.rundir import RunDir
from sciftune.strategies.engine import Engine
from sciftune.training.checkpoints import CheckpointTensors
from sciftune.training.task import get_task

BATCH = 4 if os.environ.get("SCIFTUNE_SLOW") else 2  # of four processes, or of two
# a large adam_epsilon keeps gradients that are zero but for rounding from moving weights
BASE = dict(
    model="sdxl",
    objective="dmd2",
    figures=16,
    gan=True,
    resolution=128,
    micro_batch=BATCH,
    global_batch=BATCH,
    steps=3,
    generator_every=2,
    denoising_steps=2,
    critic_learning_rate=5e-5,
    adam_epsilon=1e-6,
    warmup_steps=3,
    max_grad_norm=1.0,
    ema_decay=0.9,
    validation_steps=0,
    checkpoint_steps=2,
    checkpoints_kept=9,
    export=False,
)
OTHER = dict(
    BASE,
    model="sd15",
    objective="dmd_decoupled",
    gan=False,
    resolution=64,
    gradient_checkpointing="full",
)
LORA = dict(
    OTHER,
    lora_rank=4,
    lora_alpha=2,
    lora_targets="to_q,to_out.0,conv1,time_emb_proj",
    steps=3,
    checkpoint_steps=3,
)
KEYS = (
    "generator_total",
    "guidance_total",
    "loss_fake_mean",
    "dm_gradient_norm",
    "grad_norm_critic",
    "grad_norm_generator",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("distill")


def train(run, **fields):
    "Train a U-Net of two levels, whose folder is beside the run's."
    return forked.train(run, model_path=small_unet(fields["model"], run.path.parent), **fields)


@pytest.fixture(scope="module")
def alone(root):
    made = {}

    def get(base):
        key = f"{base['model']}-{base.get('lora_rank', 0)}"
        if key not in made:
            run = RunDir(root / key)
            made[key] = train(run, **base), run
        return made[key]

    return get


def furthest(a, b, step, states=("weight",)):
    "Largest difference between two checkpoints, over generator, its average and critic."
    worst = 0.0
    for net in ("generator", "critic"):
        for state in states + (("ema",) if net == "generator" else ()):
            x, y = (
                CheckpointTensors(r.checkpoints / f"step_{step:06d}", net, state) for r in (a, b)
            )
            assert x.keys() == y.keys() and x.keys()
            worst = max([worst] + [(x[n] - y[n]).abs().max().item() for n in x])
    return worst


def same(m, run, reference, base):
    want, first = reference
    steps = range(1, base["steps"] + 1)
    assert set(losses(m)) == set(steps) and set(losses(m, "generator_total")) == set(
        losses(want, "generator_total")
    ) == set(steps[:: base["generator_every"]])

    def off(keys, floor):
        return max(
            abs(losses(m, k)[s] - v) / max(abs(v), floor)
            for k in keys
            for s, v in losses(want, k).items()
        )

    assert off(KEYS, 0.1) <= 1e-4 and off(KEYS[:3], 1.0) <= 1e-5
    assert furthest(first, run, base["steps"]) <= 1e-5


def slow(*a):
    return pytest.param(*a, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "base,engine,n,more",
    [
        (BASE, "ddp", 2, {}),
        slow(LORA, "fsdp", 2, {}),
        slow(LORA, "ddp", 2, {}),
        slow(BASE, "fsdp", 2, {}),
        slow(BASE, "fsdp", 4, {}),
        slow(BASE, "fsdp", 2, dict(micro_batch=1)),
        slow(BASE, "fsdp", 4, dict(hybrid_shard=2, teacher_placement="sharded")),
        slow(OTHER, "fsdp", 2, dict(teacher_placement="sharded", live_captions=True)),
        slow(OTHER, "fsdp", 4, dict(reshard=False)),
        slow(OTHER, "ddp", 4, dict(teacher_placement="offload")),
        slow(OTHER, "single", 1, dict(micro_batch=1, gradient_checkpointing="none")),
    ],
)
def test_equals_single(root, alone, base, engine, n, more):
    "All iterations: losses, gradient norms, and the weights of generator, critic and average."
    run = RunDir(root / f"{base['model']}-{base.get('lora_rank', 0)}-{engine}-{n}-{'-'.join(more)}")
    same(
        train(run, strategy=engine, num_processes=n, **base | dict(micro_batch=BATCH // n) | more),
        run,
        alone(base),
        base,
    )


def test_resume_is_exact(root, alone):
    "Networks, optimizers and the average continue to the last bit; other fields are refused."
    m, first = alone(BASE)
    run = RunDir(root / "resumed")
    info = json.loads((first.checkpoints / "step_000002" / "info.json").read_text())
    assert info["steps"] == dict(generator=1, critic=2)
    path = str(first.checkpoints / "step_000002")
    got = train(run, resume=path, **BASE)
    assert min(losses(got)) == 3 and all(
        losses(got, k)[s] == losses(m, k)[s] for k in KEYS for s in losses(got, k)
    )
    assert furthest(first, run, 3, ("weight", "exp_avg", "exp_avg_sq")) == 0
    with pytest.raises(RecipeError, match="real_guidance: 1.75 in the checkpoint, 3.0 now"):
        check_same_run(info, restored(info["recipe"] | dict(real_guidance=3.0)), info["data"])


@pytest.mark.slow
@pytest.mark.parametrize("engine,n", [("fsdp", 2), ("ddp", 2)])
def test_resume_by_another_engine(root, alone, engine, n):
    _, first = alone(BASE)
    run = RunDir(root / f"to-{engine}")
    m = train(
        run,
        strategy=engine,
        num_processes=n,
        resume=str(first.checkpoints / "step_000002"),
        **BASE | dict(micro_batch=BATCH // n),
    )
    assert min(losses(m)) == 3 and furthest(first, run, 3) <= 1e-5


def _measure(queue, root, more):
    torch.set_num_threads(1)
    r = resolve(
        **BASE
        | dict(precision="bf16-mixed", model="sd15", gan=False, cpu=True, run_root=str(root))
        | more
    )

    def live():
        gc.collect()
        return sum(
            dict(
                (p.untyped_storage().data_ptr(), p.untyped_storage().nbytes())
                for p in gc.get_objects()
                if isinstance(p, torch.nn.Parameter)
            ).values()
        )

    before = live()
    t = get_task(r.objective)(r, Engine(r), RunDir(root / "once"), Plan(), lambda *a, **k: None)
    net = t.networks["generator"]
    adapters = 4 * sum(p.numel() for p in net.params.values()) if r.lora_rank else 0
    frozen = [
        p
        for p in (net if r.lora_rank else t.teacher).parameters()
        if not any(p is q for q in net.params.values())
    ]
    queue.put(
        (
            (live() - before - adapters) / sum(p.numel() for p in frozen),
            len(net.optimizer.state),
            any(p.requires_grad for p in frozen),
        )
    )
    os._exit(0)


@pytest.mark.parametrize("more,bytes_each", [({}, 4 + 4 + 2), (dict(lora_rank=4), 2 + 4)])
def test_teacher_is_held_once(root, more, bytes_each):
    """Measured over all live parameters of a process under bf16-mixed.

    4 + 4 bytes for generator and critic and 2 for the teacher; with LoRA 2 for generator and
    teacher and 4 for the critic.
    """
    ctx = mp.get_context("fork")
    queue = ctx.SimpleQueue()
    p = ctx.Process(target=_measure, args=(queue, root, more))
    p.start()
    assert wait([p]) == [0]
    size, states, trained = queue.get()
    assert abs(size - bytes_each) < 0.01 and not states and not trained


def test_sharded_mixed_precision(root):
    """The critic is first seen frozen; its gradients are reduced in fp32 all the same.

    Its norms are those of one process.
    """
    conf = OTHER | dict(precision="bf16-mixed", steps=1, warmup_steps=0, checkpoint_steps=0)
    a = train(RunDir(root / "mixed-1"), **conf)
    b = train(
        RunDir(root / "mixed-2"),
        strategy="fsdp",
        num_processes=2,
        **conf | dict(micro_batch=BATCH // 2),
    )
    for k in ("guidance_total", "grad_norm_critic", "generator_total"):
        assert losses(a, k).keys() == losses(b, k).keys() and all(
            abs(losses(b, k)[s] - v) < 0.03 * abs(v) + 1e-3 for s, v in losses(a, k).items()
        ), (k, losses(a, k), losses(b, k))


def test_zero_says_why():
    with pytest.raises(RecipeError, match="one network .* use .*'fsdp'"):
        resolve(model="sd15", objective="dmd2", strategy="zero3")
