"""Unified training: engines against each other on uneven mixtures, exact resumes, frozen parts.

Fresh forked processes, tiny model, fp32.
"""

import functools
import json
import shutil

import pytest
import torch
from forked import ENGINES, deviation, log, losses, recipe_of, start, train, wait
from pairwise import usual
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import flex_attention

from sciftune.core.checkpoint_folders import checkpoint_name
from sciftune.core.recipe import resolve
from sciftune.core.rundir import RunDir
from sciftune.extras.bagel.family import Bagel
from sciftune.extras.bagel.network import DenseAttention, FlexAttention, sample_masks
from sciftune.planner.profile import weights_path
from sciftune.strategies.compilation import compiled_graphs
from sciftune.training.checkpoints import CheckpointTensors

STEPS, HALF = 10, 6
BASE = dict(
    model="bagel",
    figures=16,
    held_out=6,
    validation_steps=0,
    checkpoint_steps=HALF,
    steps=STEPS,
    lr_schedule="constant",
    learning_rate=1e-3,
    export=False,
    checkpoints_kept=9,
    global_batch=2,
    expected_tokens=320,
    max_tokens=400,
    max_sample_tokens=400,
    text_tokens=8,
    seed=1,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("unified")


@pytest.fixture(scope="module")
def references(root):
    "Single-process runs by global batch, made when asked for."
    made = {}

    def get(batch):
        if batch not in made:
            made[batch] = train(
                RunDir(root / f"reference-{batch}"),
                **BASE | dict(global_batch=batch),
                ema_decay=0.9,
            )
        return made[batch]

    return get


@pytest.fixture(scope="module")
def reference(references):
    return references(2)


def weights(run, step, state="weight"):
    t = CheckpointTensors(run.checkpoints / f"step_{step:06d}", state=state)
    return {n: t[n] for n in t}


def same_weights(a, b, tolerance):
    return a.keys() == b.keys() and max(float((a[n] - b[n]).abs().max()) for n in a) <= tolerance


TWO = [("fsdp", 2), ("ddp", 2), ("zero3", 2)]
FOUR = [
    ("fsdp", 4),
    ("fsdp-hybrid", 4),
    ("fsdp-offload", 2),
    ("zero2", 2),
    ("zero3-params", 2),
    ("ddp", 4),
    ("zero3", 4),
]


@pytest.mark.parametrize("engine,n", usual([], TWO + FOUR))  # zero3: test_families.py
def test_engines_equal_single(root, references, engine, n):
    batch = 2 if (engine, n) in TWO else 4
    reference, one = references(batch), RunDir(root / f"reference-{batch}")
    run = RunDir(root / f"{engine}-{n}")
    m = train(
        run, num_processes=n, **BASE | dict(global_batch=batch), **ENGINES[engine], ema_decay=0.9
    )
    assert (
        set(losses(m)) == set(range(1, STEPS + 1))
        and deviation(m, reference) <= 1e-5
        and deviation(m, reference, "grad_norm") <= 1e-4
    )
    for k in ("ce", "mse"):  # 0 where a step has no text, or no image
        got, wanted = losses(m, k), losses(reference, k)
        assert max(abs(got[s] - want) for s, want in wanted.items()) <= 3e-5, k
    counts = {(r["total_ce_tokens"], r["total_mse_tokens"]) for r in reference if "ce" in r}
    assert len(counts) > STEPS // 2, "the mixtures are uneven"
    assert same_weights(weights(run, STEPS, "ema"), weights(one, STEPS, "ema"), 2e-4)


def without_kernels(rank, run):
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


COMPILED = (("single", 1), ("ddp", 2), ("zero2", 2), ("zero3", 2), ("fsdp-offload", 2), ("fsdp", 2))
RECOMPUTED = [(*engine, "full") for engine in COMPILED]


@pytest.mark.slow  # one process compiles such packs in the notebook of compilation
@pytest.mark.parametrize("engine,n,recomputed", [*RECOMPUTED, ("single", 1, "none")])
def test_compiled_layers_equal_single(root, reference, engine, n, recomputed):
    run = RunDir(root / f"compiled-{engine}-{n}-{recomputed}")
    fields = BASE | dict(compile=True, gradient_checkpointing=recomputed, num_processes=n)
    recipe = recipe_of(run, **fields, **ENGINES[engine], ema_decay=0.9)
    codes = wait(start(run, recipe, without_kernels))
    assert not any(codes), log(run)[-3000:]
    m = run.read_metrics()
    assert set(losses(m)) == set(range(1, STEPS + 1)) and deviation(m, reference) <= 1e-5
    assert deviation(m, reference, "grad_norm") <= 1e-4
    assert graphs_after_second(m) == 0
    kinds = [losses(m, f"{kind}_tokens") for kind in ("text", "vit", "vae")]
    assert all(len(set(counts.values())) > 3 for counts in kinds), "the packs differ"
    drawn = losses(m, "vae_tokens")
    assert min(drawn[step] for step in range(3, STEPS + 1)) == 0, "a step without drawn images"


def graphs_after_second(m):
    graphs = losses(m, "compiled_graphs")
    assert graphs[STEPS] >= 4
    return graphs[STEPS] - graphs[2]


def test_flex_attention_is_compiled_once_for_all_packs():
    "Forward, which is what a CPU has of it: packs of other samples, splits and modes."
    flex = torch.compile(flex_attention, dynamic=False, backend="aot_eager")
    packs = (
        ([100, 60], [30, 70, 60], ["causal", "noise", "full"]),
        ([200], [100, 100], ["full", "causal"]),
        ([50, 50, 90], [50, 50, 40, 50], ["causal", "causal", "full", "noise"]),
        ([255], [255], ["causal"]),
    )
    graphs = []
    for lens, splits, modes in packs:
        attend = FlexAttention(lens, splits, modes, "cpu", pad_to=256)
        attend.flex = flex
        q, k, v = (torch.randn(sum(lens), heads, 16) for heads in (4, 2, 2))
        dense = DenseAttention(sample_masks(lens, splits, modes))(0, q, k, v)
        for layer in range(2):
            assert (attend(layer, q, k, v) - dense).abs().max() < 1e-5
        graphs.append(compiled_graphs())
    assert graphs[-1] == graphs[0] > 0


@pytest.mark.parametrize(
    "engine,n", [("fsdp", 2), pytest.param("single", 1, marks=pytest.mark.slow)]
)
def test_resume_is_exact_including_the_packer(root, reference, engine, n):
    source = RunDir(root / "reference-2")
    info = json.loads((source.checkpoints / checkpoint_name(HALF) / "info.json").read_text())
    stream = info["task"]["stream"]
    # not the batch made ahead; samples wait
    assert stream["step"] == HALF and stream["sequences"]["packs"] == 2 * HALF
    assert stream["sequences"]["waiting"]
    run = RunDir(root / f"resumed-{engine}")
    m = train(
        run,
        num_processes=n,
        resume=str(source.checkpoints / checkpoint_name(HALF)),
        **BASE,
        **ENGINES[engine],
        ema_decay=0.9,
    )
    assert (
        min(losses(m)) == HALF + 1
        and deviation(m, reference) <= 1e-5
        and deviation(m, reference, "total_samples") == 0
        and deviation(m, reference, "tokens") == 0
    )


LLM, VIT = "language_model.", "vit_model."
TRAINED = dict(
    all=lambda n: True,
    freeze_llm=lambda n: not n.startswith(LLM),
    freeze_vit=lambda n: not n.startswith(VIT),
    lora_rank=lambda n: ".lora_" in n,
    freeze_und=lambda n: (
        "_moe_gen" in n or n.split(".")[0] in ("time_embedder", "vae2llm", "llm2vae")
    ),
)


def pretrained(root):
    """The stand-in with a last projection as after training.

    While it is zero, as in a new model, no gradient passes it, and adapters would stay.
    """
    base, out = (
        weights_path(resolve(model="bagel", run_root=str(root)), Bagel()),
        root / "pretrained",
    )
    shutil.copytree(base, out)
    state = load_file(out / "ema.safetensors")
    state["llm2vae.weight"] = (
        torch.randn(state["llm2vae.weight"].shape, generator=torch.Generator().manual_seed(0))
        * 0.05
    )
    save_file(state, out / "ema.safetensors")
    return out


@pytest.mark.parametrize("mode", TRAINED)
def test_a_mode_changes_only_what_it_should(root, mode):
    "In what is exported: what is frozen is bitwise the base's, every other tensor moved."
    conf = (
        BASE
        | dict(steps=3, checkpoint_steps=0, export=True, max_grad_norm=0.0, adam_epsilon=1e-15)
        | ({} if mode == "all" else {mode: 2 if mode == "lora_rank" else True})
    )
    if mode == "lora_rank":
        conf["model_path"] = str(pretrained(root))
    run = RunDir(root / f"mode-{mode}")
    train(run, **conf, **(ENGINES["fsdp"] | dict(num_processes=2) if mode == "freeze_llm" else {}))
    base, learns = Bagel().denoiser_weights(root / "cache" / "stand-ins" / "bagel"), TRAINED[mode]
    if mode == "lora_rank":
        made = load_file(run.model / "adapter_model.safetensors")
        assert len(made) == 2 * 2 * 2 * 7 and all(
            n.startswith("base_model.model.language_model.") for n in made
        )
        assert set(weights(run, 3)) == {
            n.removeprefix("base_model.model.").replace(".weight", ".default.weight") for n in made
        }
        assert all(t.any() for t in made.values()), "an adapter did not move"
        from sciftune.training.export import merge_lora

        merge_lora(conf["model_path"], run.model, root / "merged", torch.float32)
        base, new = (Bagel().denoiser_weights(f) for f in (conf["model_path"], root / "merged"))
        layers = {n.removeprefix("base_model.model.").split(".lora_")[0] + ".weight" for n in made}
        assert {n for n in base if not torch.equal(base[n], new[n])} == layers
        return
    made, trained = load_file(run.model / "ema.safetensors"), weights(run, 3)
    assert set(made) == set(base)
    assert set(trained) == {n for n in base if learns(n) and not n.endswith("pos_embed")}
    for n, t in made.items():
        if n in trained:
            assert torch.equal(t.flatten(), trained[n].bfloat16()) and not torch.equal(
                trained[n], base[n].flatten()
            ), f"{n} did not move"
        else:
            assert torch.equal(t, base[n].bfloat16()), f"{n} moved"


def test_validation_writes_texts_and_images_while_sharded(root):
    runs = {}
    for e, n in (("single", 1), ("fsdp", 2)):
        run = runs[e] = RunDir(root / f"look-{e}")
        m = train(
            run,
            num_processes=n,
            **(
                BASE
                | dict(
                    steps=1,
                    checkpoint_steps=0,
                    validation_steps=1,
                    validation_images=1,
                    validation_sample_steps=3,
                )
            ),
            **ENGINES[e],
        )
        assert [r["step"] for r in m if "held_out_ce" in r] == [0, 1] and (
            run.validation_images / "step_000001" / "00.png"
        ).exists()
    a, b = (
        {r["step"]: r for r in run.read_metrics() if "held_out_ce" in r} for run in runs.values()
    )
    assert all(abs(a[s][k] - b[s][k]) <= 1e-5 for s in a for k in ("held_out_ce", "held_out_mse"))
    said = [
        json.loads((run.validation_images / "step_000001" / "texts.json").read_text())
        for run in runs.values()
    ]
    assert said[0] == said[1] and said[0][0]["expected"]


def test_starts_from_an_earlier_run(root, reference):
    """finetune_from_ema under its own name: the averaged weights, a new optimizer, new data.

    What is frozen now is the earlier run's, not the base's.
    """
    run, earlier = RunDir(root / "started"), weights(RunDir(root / "reference-2"), STEPS, "ema")
    with pytest.warns(UserWarning, match="finetune_from_ema"):
        m = train(
            run,
            **(
                BASE
                | dict(
                    steps=1,
                    checkpoint_steps=0,
                    seed=9,
                    learning_rate=1e-9,
                    freeze_llm=True,
                    export=True,
                    num_processes=2,
                )
            ),
            **ENGINES["fsdp"],
            resume_from=str(root / "reference-2" / "checkpoints" / checkpoint_name(STEPS)),
            finetune_from_ema=True,
        )
    assert min(losses(m)) == 1
    new, made = weights(run, 1), load_file(run.model / "ema.safetensors")
    assert (
        set(new) == {n for n in earlier if not n.startswith(LLM)}
        and max(float((new[n] - earlier[n]).abs().max()) for n in new) <= 1e-6
    )
    assert all(
        torch.equal(made[n].flatten(), earlier[n].bfloat16()) for n in earlier if n.startswith(LLM)
    )


def pictures(folder, count=30):
    """A collection of drawings, one text that is far too long, and the recipe that reads it."""
    folder.mkdir()
    for n in range(count):
        Image.effect_noise((64, 48), 40 + n).save(folder / f"{n}.png")
    lines = [dict(text_prompt=f"noise {n}", image_path=f"{n}.png") for n in range(count)]
    lines.append(dict(segments=[dict(type="text", text="word " * 999, loss=True)]))
    file = folder / "all.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    recipe = {name: value for name, value in BASE.items() if name != "figures"}
    return recipe | dict(data=str(file), held_out=2, steps=4, checkpoint_steps=2)


def test_an_unreadable_image_is_set_aside_before_training(root):
    recipe = pictures(root / "pictures")
    whole = train(RunDir(root / "whole"), **recipe)
    torn = root / "pictures" / "7.png"
    torn.write_bytes(torn.read_bytes()[:200])
    run = RunDir(root / "torn")
    m = train(run, num_processes=2, **recipe | ENGINES["fsdp"])
    assert set(losses(m)) == {1, 2, 3, 4}
    (row,) = map(json.loads, run.quarantine.read_text().splitlines())
    assert row["source"] == "all.jsonl:8" and "truncated" in row["reason"]
    assert json.loads(run.record.read_text())["rejected"] == 1
    assert "1 examples set aside" in log(run)
    # the run that met it in mid-training goes on without it
    run = RunDir(root / "past")
    began = root / "whole" / "checkpoints" / "step_000002"
    m = train(run, **recipe, resume=str(began))
    assert set(losses(m)) == {3, 4}
    drawn = losses(whole, "total_samples")
    assert drawn[4] - drawn[2] >= 31  # steps 3 and 4 draw every example
    # half of the images are more than is allowed
    for n in range(0, 30, 2):
        (root / "pictures" / f"{n}.png").unlink()
    with pytest.raises(RuntimeError, match="16 of 31 rows cannot be used, more than max_bad_frac"):
        train(RunDir(root / "many"), **recipe)


def test_samples_that_are_too_long_are_counted(root):
    run = RunDir(root / "counted")
    m = train(run, **pictures(root / "more") | dict(steps=3, checkpoint_steps=0))
    counts = losses(m, "too_long_samples")
    assert 0 < counts[3] <= 4 and list(counts.values()) == sorted(counts.values())
    assert "more than max_sample_tokens=400 tokens" in log(run)
