"""Pretraining and fine-tuning of the nano models, end to end and as small as it goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sciftune.extras.figures.nano import NANO_TEXT

ROOT = Path(__file__).resolve().parents[3]


def run_notebook(name, where, **parameters):
    flags = [x for k, v in parameters.items() for x in ("-p", k, str(v))]
    r = subprocess.run(
        [
            sys.executable,
            "-m",
            "papermill",
            str(ROOT / f"nbs/experiments/{name}.ipynb"),
            str(where),
            "--no-progress-bar",
            "--log-level",
            "ERROR",
            "--cwd",
            str(where.parent),
            *flags,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert r.returncode == 0, r.stderr[-3000:]


@pytest.mark.slow
def test_from_nothing_to_a_fine_tune(tmp_path):
    "The two notebooks of the nano models at their smallest, the second on what the first made."
    run_notebook(
        "nano", tmp_path / "nano.ipynb", run_root=tmp_path / "pretraining", out=tmp_path / "nano"
    )
    assert sorted(p.name for p in (tmp_path / "nano").iterdir()) == [
        "README.md",
        "klein",
        "qwenimage",
        "reader",
    ]
    run_notebook(
        "nano_finetune",
        tmp_path / "finetune.ipynb",
        model="klein",
        base=tmp_path / "nano" / "klein",
        seeds="0",
        judged=8,
        smoke=True,
        run_root=tmp_path / "style",
    )


@pytest.mark.slow
def test_an_editor(tmp_path):
    "The notebook of the edit models at its smallest: editor, one edit more, their scores."
    run_notebook("nano_edit", tmp_path / "edit.ipynb", seeds="0", run_root=tmp_path / "runs")
    run = tmp_path / "runs" / "klein-edit-0"
    rows = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [row["series"] for row in rows] == ["base", "weights", "ema"]
    assert all({"happened", "stayed", "edited"} <= set(row["scores"]) for row in rows)


@pytest.mark.slow
def test_a_reward_after_supervised_training(tmp_path):
    "The notebook of Flow-GRPO at its smallest, with a second reader."
    few = dict(smoke=True, seeds="0", judged=8, judged_all=8, judge_steps=3)
    run_notebook("nano_grpo", tmp_path / "out.ipynb", run_root=tmp_path / "runs", **few)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwenimage", "klein"])
def test_adapter_and_average(tmp_path, model):
    "The notebook with both, at its smallest: strength 0 is the base, merged draws as beside."
    run_notebook(
        "nano_adapter",
        tmp_path / "adapter.ipynb",
        model=model,
        smoke=True,
        run_root=tmp_path / "runs",
    )


@pytest.mark.parametrize(
    "model, extra",
    [
        ("qwenimage", dict(true_cfg_scale=2.5, negative_prompt=[" "] * 8)),
        ("klein", dict(guidance_scale=2.5, max_sequence_length=NANO_TEXT)),
    ],
)
def test_packaged_weights_draw_with_diffusers(model, extra):
    """What is in the package, loaded by diffusers alone, draws charts.

    The packaged reader finds in them the kinds that the captions name.
    """
    import torch
    from diffusers import DiffusionPipeline

    from sciftune.core.presets import nano_folder, preset_files
    from sciftune.extras.figures.charts import draw_chart
    from sciftune.extras.figures.reader import following, load_reader, packaged_reader

    kinds = tuple(preset_files()["nano_denoiser"].recipe["figures_kinds"].split(","))
    captions = [draw_chart(i, 21, ("light",), kinds, 128).caption for i in range(8)]
    pipe = DiffusionPipeline.from_pretrained(
        nano_folder(model), dtype=torch.float32, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        prompt=captions,
        height=128,
        width=128,
        num_inference_steps=12,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
        **extra,
    ).images
    made = (images * 2 - 1).float()
    assert following(load_reader(packaged_reader()), made, captions)["kind"] >= 0.75


def test_missing_nano_is_named(monkeypatch):
    from sciftune.core import presets
    from sciftune.core.fields import RecipeError

    with pytest.raises(RecipeError, match="there are such models of .*klein.* only"):
        presets.nano_folder("sdxl")
    monkeypatch.setattr(presets, "package_folder", lambda: Path("/nowhere/sciftune"))
    with pytest.raises(RecipeError, match="scripts/nano.*model_path='tiny'"):
        presets.nano_folder("klein")
