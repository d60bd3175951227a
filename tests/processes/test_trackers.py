"""A run with wandb (offline) and TensorBoard that is killed, resumed and evaluated: what they have
is read back from their files."""

import json
import os
import signal
import sys
import time
from collections import defaultdict

import pytest
from forked import recipe_of, start, train, wait

from sciftune.core.checkpoint_folders import complete_checkpoints
from sciftune.core.rundir import RunDir
from sciftune.lab.evaluation_plots import run_evaluation
from sciftune.training import trainer

pytest.importorskip(
    "wandb.sdk.launch", reason="no wandb in this environment (pip install 'sciftune[track]')"
)
pytest.importorskip("tensorboard", reason="no tensorboard (pip install 'sciftune[track]')")

FIELDS = dict(
    model="qwenimage",
    resolution=64,
    figures=24,
    held_out=4,
    micro_batch=2,
    global_batch=4,
    steps=8,
    validation_steps=4,
    validation_images=2,
    validation_sample_steps=2,
    checkpoint_steps=4,
    learning_rate=1e-3,
    trackers="wandb,tensorboard",
)
BLOCK = 32768  # bytes of a block of wandb's file, which is a LevelDB log with a header of 7 bytes


def written_step(run):
    "The last step in wandb's file, which wandb writes every 15 seconds."
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    rows = [record.history for record in records(file) if record.HasField("history")]
    return max((row.step.num for row in rows), default=-1)


def dies_after_its_checkpoint(rank, run):
    "Killed in the seventh step, with the checkpoint of step 4, when wandb has written that far."
    real = trainer.train_step

    def step(of, number, batches):
        if number == 6:  # wandb keeps a step when the next one comes
            while not complete_checkpoints(run) or written_step(run) < 4:
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(of, number, batches)

    trainer.train_step = step


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, warm_python):
    "The run folder, after a kill, a resume and an evaluation."
    run = RunDir(tmp_path_factory.mktemp("tracked") / "curious")
    unset = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_RUN_ID")
    with pytest.MonkeyPatch.context() as patch:
        for name in unset:
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(run.path.parent / "no-login"))
        patch.setenv("WANDB_PROJECT", "x")
        codes = wait(start(run, recipe_of(run, **FIELDS), dies_after_its_checkpoint))
        assert codes == [-signal.SIGKILL]
        train(run, resume="latest", **FIELDS)
        patch.setattr(sys, "executable", warm_python)
        run_evaluation(run.path, count=2, say=lambda text: None)
    return run


def records(file):
    "The records of a .wandb file."
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + length > len(data):
            return  # being written
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@pytest.fixture(scope="module")
def offline(tracked):
    "Records of all offline files of the run, by kind."
    found = defaultdict(list)
    for file in sorted((tracked.path / "wandb").glob("offline-run-*/*.wandb")):
        for record in records(file):
            kind = record.WhichOneof("record_type")
            found[kind].append(getattr(record, kind))
    return found


def history(offline):
    "Step -> name -> value, of all rows."
    rows = defaultdict(dict)
    for row in offline["history"]:
        for item in row.item:
            *outer, name = item.nested_key or [item.key]
            place = rows[row.step.num]
            for one in outer:
                place = place.setdefault(one, {})
            place[name] = json.loads(item.value_json)
    return rows


def test_a_kill_and_a_resume_are_one_run_of_the_project_asked_for(tracked, offline):
    files = list((tracked.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 3  # killed, resumed, evaluated
    (ident,) = {one.run_id for one in offline["run"]}
    assert ident == (tracked.path / "trackers/wandb_id").read_text()
    assert {one.project for one in offline["run"]} == {"x"}
    assert {one.display_name for one in offline["run"]} == {"curious"}


def test_numbers_and_recipe_are_there(tracked, offline):
    rows = history(offline)
    steps = [step for step, row in sorted(rows.items()) if "loss" in row]
    assert steps == list(range(1, 9))
    kept = {row["step"]: row["loss"] for row in tracked.read_metrics() if "loss" in row}
    assert [rows[step]["loss"] for step in steps] == pytest.approx([kept[s] for s in steps])
    assert any(name.startswith("loss_sigma/") for name in rows[8])
    assert any(name.startswith("held_out_sigma/") for name in rows[8])
    updates = [item for one in offline["run"] + offline["config"] for item in _updates(one)]
    config = {item.key or item.nested_key[0]: item.value_json for item in updates}
    assert json.loads(config["learning_rate"]) == 1e-3
    assert json.loads(config["model"]) == "qwenimage"


def _updates(record):
    return record.config.update if hasattr(record, "config") else record.update


def test_pictures_come_with_their_prompts_before_and_after(tracked, offline):
    rows = history(offline)
    for step in (0, 4, 8):
        shown = rows[step]["validation"]
        folder = tracked.validation_images / f"step_{step:06d}"
        assert shown["count"] == 2
        assert shown["captions"] == json.loads((folder / "prompts.json").read_text())
        for name in shown["filenames"]:
            (kept,) = (tracked.path / "wandb").glob(f"offline-run-*/files/{name}")
            originals = [path.read_bytes() for path in folder.glob("0*.png")]
            assert kept.read_bytes() in originals


def test_scores_have_an_axis_of_their_own_and_a_table(tracked, offline):
    rows = [row for row in history(offline).values() if "evaluation/step" in row]
    kept = (tracked.path / "evaluation.jsonl").read_text().splitlines()
    assert len(kept) >= 2
    wanted = {}
    for row in map(json.loads, kept):
        value = row["scores"]["kind"]["value"]
        wanted[f"evaluation/{row['series']}/kind"] = (max(row["step"], 0), value)
    found = {name: (row["evaluation/step"], row[name]) for row in rows for name in row}
    assert {name: found[name] for name in wanted} == wanted
    tables = [
        row["evaluation/table"] for row in history(offline).values() if "evaluation/table" in row
    ]
    (table,) = tables
    assert (table["_type"], table["nrows"]) == ("table-file", len(kept))


def test_tensorboard_has_the_same(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tracked.path / "trackers/x"), size_guidance=dict(images=0))
    board.Reload()
    names = board.Tags()
    assert sorted({one.step for one in board.Scalars("loss")}) == list(range(1, 9))
    assert any(name.startswith("loss_sigma/") for name in names["scalars"])
    assert any(name.startswith("evaluation/weights/") for name in names["scalars"])
    assert {one.step for one in board.Images("validation/00")} == {0, 4, 8}
    assert {"validation/00/prompt/text_summary", "evaluation/table/text_summary"} <= set(
        names["tensors"]
    )
