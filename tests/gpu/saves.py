"""Save, kill and resume a large model as a user's run would, and say how long each took.

    python tests/gpu/saves.py WORK [--blocks 60] [--gpus 2] [--kills rank agent] [--weights FOLDER]

Qwen-Image at its real width with random weights: 27 blocks are 9 billion parameters, 60 all of it.
The weights are written to WORK, or to FOLDER, then a run is started as `launch` starts it. It is
asked for two checkpoints. Inside a third one a process is killed, the run is resumed on as many
GPUs, and so on; after the last kill it is resumed on half of them. After each resume losses are
compared to those of the same steps before. WORK needs room for the weights, unless they are in
FOLDER, and for two checkpoints, 26 bytes a parameter; without kills (`--kills` and no name) for one
checkpoint, 14 bytes. With `--cpu` and a small `--heads` it tries itself.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from jobs import begin, living, processes_of, recipe_in, wait
from kills import seconds_until_gone

from sciftune.core.checkpoint_folders import complete_checkpoints
from sciftune.lab.jobs import state
from sciftune.models import qwenimage
from sciftune.models.family import get_family

GIB = 2**30
STEPS_BEFORE = 8  # the first request for a checkpoint
STEPS_AFTER = 6  # steps that are compared after a resume
ENDLESS = 10**6


def size(folder):
    "GiB of the files in a folder."
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / GIB


def large_pipeline(folder, blocks, heads, device):
    "The stand-in with a denoiser of so many blocks, bf16; the folder, and its parameters."
    family = get_family("qwenimage")
    folder = Path(family.tiny(folder))
    small = family.config(folder)
    config = dict(
        qwenimage.QWEN_IMAGE,
        num_layers=blocks,
        num_attention_heads=heads,
        joint_attention_dim=small["joint_attention_dim"],
        in_channels=small["in_channels"],
        out_channels=small["out_channels"],
    )
    model = family.random_denoiser(config, torch.bfloat16, device)
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer", max_shard_size="4GB")
    return folder, sum(p.numel() for p in model.parameters())


class Watched:
    "A run that is started, asked for checkpoints, killed and resumed."

    def __init__(self, recipe):
        self.recipe, self.run = recipe, None
        self.began = 0.0  # time of the last start

    def rows(self, event=None):
        "Rows of the record: of steps, or those of an event."
        rows = self.run.read_metrics() if self.run else []
        return [row for row in rows if row.get("event") == event and "step" in row]

    def until(self, ready):
        "Wait for something that a living run does."

        def reached():
            assert state(self.run) == "running", self.run.log.read_text()[-6000:]
            return ready()

        wait(reached, pause=0.02)

    def start(self, label, **change):
        "Start or resume; returns when some steps are done."
        known = len(self.rows("launch"))
        self.began = time.time()
        self.run = begin(self.recipe.model_copy(update=change))
        self.until(lambda: len(self.rows("launch")) > known)
        launch = self.rows("launch")[-1]
        stages = {name: round(spent, 1) for name, spent in launch["seconds"].items()}
        self.say(f"{label}: first step", time.time() - self.began, **stages)
        first = launch["step"]
        self.until(lambda: max(self.losses(), default=0) >= first + STEPS_BEFORE)

    def say(self, what, seconds, **more):
        "A line of the result."
        print(json.dumps(dict(what=what, seconds=round(seconds, 2), **more)), flush=True)

    def ask(self):
        "Ask for a checkpoint; returns when it has begun."
        known = len(self.rows("checkpoint"))
        self.run.save_request.touch()
        self.until(lambda: len(self.rows("checkpoint")) > known)
        return self.rows("checkpoint")[-1]

    def save(self, label):
        "A checkpoint; returns the seconds from its copy to its end."
        event = self.ask()
        self.say(f"{label}: training stands still", event["seconds"])
        began = time.monotonic()
        name = f"step_{event['step']:06d}"
        self.until(lambda: name in [path.name for path in complete_checkpoints(self.run)])
        spent = time.monotonic() - began
        rows = [row["step_time"] for row in self.rows() if row["step"] > event["step"]]
        self.say(
            f"{label}: written",
            spent,
            gib=round(size(self.run.checkpoints / name), 1),
            steps_meanwhile=len(rows),
            slowest_step=round(max(rows, default=0.0), 2),
        )
        return spent

    def kill(self, who, after):
        "Kill a process of the run inside a checkpoint, `after` seconds after it began."
        self.ask()
        time.sleep(after)
        half = [path.name for path in self.run.checkpoints.glob(".step_*")]
        assert half, "the checkpoint had ended when the process was to be killed"
        processes_of(self.run)[who][0].kill()
        taken, left = seconds_until_gone(self.run)
        self.say(f"{who} killed inside a checkpoint: all ranks have ended", taken, orphans=left)
        assert not left

    def losses(self):
        "Step -> loss, of the steps since the last start: the record keeps those before a resume."
        return {row["step"]: row["loss"] for row in self.rows() if row["time"] > self.began}

    def stop(self):
        "End it without a checkpoint."
        for process in living(self.run):
            process.kill()
        wait(lambda: not living(self.run))


def arguments():
    "The command line."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--blocks", type=int, default=27)
    parser.add_argument("--heads", type=int, default=24, help="fewer make a narrow model")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--kills", nargs="*", default=["rank", "agent"], choices=("rank", "agent"))
    parser.add_argument("--weights", type=Path, help="a folder for them; WORK without it")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def recipe_of(given, folder):
    "The recipe of a run that has no end and saves when it is asked."
    return recipe_in(
        given.work,
        "saved",
        cpu=given.cpu,
        model="qwenimage",
        model_path=str(folder),
        strategy="fsdp",
        precision="fp32" if given.cpu else "bf16-master24",
        num_processes=given.gpus,
        micro_batch=1,
        global_batch=given.gpus,
        resolution=64 if given.cpu else 512,
        text_tokens=32,
        figures=16,
        held_out=0,
        steps=ENDLESS,
        checkpoint_steps=ENDLESS,
        checkpoints_kept=1,
        validation_steps=0,
        gradient_checkpointing="full",
        lr_schedule="constant",
        plan_check=False,
        export=False,
    )


def main():
    given = arguments()
    device = "cpu" if given.cpu else "cuda"
    given.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    folder, numel = large_pipeline(
        (given.weights or given.work) / "model", given.blocks, given.heads, device
    )
    print(f"{numel / 1e9:.2f} G parameters written in {time.monotonic() - began:.1f} s", flush=True)
    if not given.cpu:
        torch.cuda.empty_cache()
    watched = Watched(recipe_of(given, folder))
    watched.start(f"{given.gpus} processes")
    spent = watched.save("first checkpoint")
    if given.kills:
        spent = watched.save("second checkpoint")
    kept = complete_checkpoints(watched.run)[-1]
    before = int(kept.name.split("_")[1])
    watched.until(lambda: max(watched.losses()) >= before + STEPS_AFTER)
    once = watched.losses()
    for number, who in enumerate(given.kills):
        if number:
            watched.start(f"resumed on {given.gpus}", resume=str(kept))
            compare(watched, once, before, "as many")
        watched.kill(who, spent / 2)
    watched.stop()
    half = max(1, given.gpus // 2)
    watched.start(f"resumed on {half}", resume=str(kept), num_processes=half)
    compare(watched, once, before, "half")
    watched.stop()


def compare(watched, once, before, how):
    "The losses of the steps after a checkpoint, against those of the run that wrote it."
    again = watched.losses()
    steps = range(before + 1, before + STEPS_AFTER + 1)
    away = max(abs(again[step] - once[step]) / abs(once[step]) for step in steps)
    other = max(abs(once[step] - once[step + 1]) / abs(once[step]) for step in list(steps)[:-1])
    said = dict(what=f"resumed on {how}", furthest_loss=away, between_steps=round(other, 4))
    print(json.dumps(said), flush=True)
    assert away < 0.02, (once, again)


if __name__ == "__main__":
    main()
