"""Kill real runs at random moments, resume them, and add what happened to docs/kills.jsonl.

    python tests/tools/kills.py [--kills 100] [--minutes 600] [--case NAME ...] [--table FOLDER]

It ends after the run in which that many kills are reached or so many minutes have passed. Several
can run at once, each with a folder of its own for the lines.

Every run is started as `launch` starts it. One of its processes, or all, get SIGKILL: the wrapper,
the agent (launcher), a rank, a process that makes batches; after some steps, inside a save or
inside the export. Then the run is resumed, until it ends. A run that was never killed is the
reference: every step must be there, with the same losses and gradient norms, and after each kill
all processes must be gone within ten seconds. A line is added for each run that has ended, and
docs/generated/kills.md is written from all lines, so that a series can be stopped at any time.
"""

import argparse
import datetime
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from forked import ENGINES
from jobs import begin, living, processes_of, recipe_in, wait

from sciftune.lab.launch import state

ROOT = Path(__file__).resolve().parents[2]
GONE = 10  # seconds until every process of a killed run must have ended
KILLS_OF_A_RUN = 6
WHO = ("rank", "agent", "wrapper", "worker", "all")
WHEN = ("step", "save", "export")
COMMON = dict(
    steps=60,
    figures=16,
    held_out=4,
    micro_batch=1,
    global_batch=2,
    validation_steps=0,
    checkpoint_steps=2,
    lr_schedule="constant",
    data_workers=1,
)
BAGEL = dict(
    model="bagel",
    data_workers=None,
    micro_batch=None,
    expected_tokens=320,
    max_tokens=400,
    max_sample_tokens=400,
    text_tokens=8,
)
DMD = dict(
    model="sd15",
    objective="dmd2",
    generator_every=2,
    ema_decay=0.9,
    data_workers=None,
    held_out=None,
)
TWO = dict(num_processes=2)
CASES = {
    "single": ENGINES["single"],
    "ddp": ENGINES["ddp"] | TWO,
    "fsdp": ENGINES["fsdp"] | TWO | dict(ema_decay=0.9),
    "fsdp, LoRA": ENGINES["fsdp"] | TWO | dict(lora_rank=4),
    "zero1": ENGINES["zero1"] | TWO,
    "zero2": ENGINES["zero2"] | TWO,
    "zero3": ENGINES["zero3"] | TWO,
    "zero3, host": ENGINES["zero3-params"] | TWO,
    "dmd2, single": DMD | ENGINES["single"],
    "dmd2, fsdp": DMD | ENGINES["fsdp"] | TWO,
    "bagel, single": BAGEL | ENGINES["single"],
    "bagel, fsdp": BAGEL | ENGINES["fsdp"] | TWO,
}


def fields_of(case):
    "The fields of the recipe of a case."
    fields = COMMON | CASES[case]
    return {name: value for name, value in fields.items() if value is not None}


def numbers(run):
    "(step, name) -> value, for every loss and gradient norm in the record."
    return {
        (row["step"], name): value
        for row in run.read_metrics()
        for name, value in row.items()
        if "step" in row and isinstance(value, float) and ("loss" in name or "grad_norm" in name)
    }


def steps_done(run):
    "The last step in the record."
    return max((row.get("step", 0) for row in run.read_metrics()), default=0)


def half_written(folder, pattern):
    "Whether a folder that is being written is there."
    return folder.exists() and any(folder.glob(pattern))


def moment(run, when, rng):
    "Wait for the moment to kill; False when the run has ended before."
    begun = steps_done(run)
    ahead = rng.randint(1, 12)
    while state(run) == "running":
        saving = half_written(run.checkpoints, ".step_*")
        exporting = half_written(run.path, f".{run.model.name}.*")
        if when == "step" and steps_done(run) >= begun + ahead:
            break
        if (when == "save" and saving) or exporting:
            break
        time.sleep(0.005)
    else:
        return False
    time.sleep(rng.random() * {"step": 0.3, "save": 0.02, "export": 0.1}[when])
    return state(run) == "running"


def kill(run, who, rng):
    "SIGKILL; who was killed."
    found = processes_of(run)
    victims = living(run) if who == "all" else found[who]
    if not victims:  # this run has no such process, or no longer
        who, victims = "rank", found["rank"]
    if who != "all" and victims:
        victims = [rng.choice(victims)]
    for process in victims:
        process.kill()
    return who if victims else None


def seconds_until_gone(run):
    "How long processes of `run` live on, and how many have to be ended after all."
    began = time.monotonic()
    while (left := living(run)) and time.monotonic() < began + GONE:
        time.sleep(0.05)
    taken = time.monotonic() - began
    for process in left:
        process.kill()
    wait(lambda: not living(run))
    return taken, len(left)


class Series:
    "A run that is killed and resumed until its end, and what happened to it."

    def __init__(self, folder, case, rng):
        self.case, self.rng = case, rng
        name = f"{case.replace(', ', '-')}-{rng.getrandbits(32):x}"
        self.recipe = recipe_in(folder, name, **fields_of(case))
        self.who, self.moments = Counter(), Counter()
        self.slowest, self.orphans, self.starts = 0.0, 0, 0

    @property
    def kills(self):
        "How many there were."
        return sum(self.who.values())

    def life(self):
        "Start or resume the run; whether it was killed."
        resume = "latest" if self.kills else self.recipe.resume
        self.run = run = begin(self.recipe.model_copy(update=dict(resume=resume)))
        self.starts += 1
        when = self.rng.choice(WHEN)
        if self.kills < KILLS_OF_A_RUN and moment(run, when, self.rng):
            saving = half_written(run.checkpoints, ".step_*")
            exporting = half_written(run.path, f".{run.model.name}.*")
            if who := kill(run, self.rng.choice(WHO), self.rng):
                self.who[who] += 1
                self.moments["export" if exporting else "save" if saving else "step"] += 1
                taken, left = seconds_until_gone(run)
                self.slowest = max(self.slowest, taken)
                self.orphans += left
                return True
        wait(lambda: state(run) != "running")
        return False

    def line(self, reference):
        "Its line, when it has ended."
        run = self.run
        assert state(run) == "finished", run.log.read_text()[-3000:]
        assert any(run.model.iterdir()), "nothing was exported"
        got, want = numbers(run), numbers(reference)
        both = got.keys() & want.keys()
        return dict(
            case=self.case,
            kills=self.kills,
            who=dict(self.who),
            moments=dict(self.moments),
            starts=self.starts,
            missing=len(want.keys() - got.keys()),
            deviation=max(abs(got[k] - want[k]) / max(abs(want[k]), 1e-12) for k in both),
            orphans=self.orphans,
            slowest=round(self.slowest, 1),
            date=str(datetime.date.today()),
            torch=torch.__version__,
            cores=os.cpu_count(),
        )


def whole_run(folder, case):
    "The run of a case that nobody kills."
    run = begin(recipe_in(folder, f"{case.replace(', ', '-')}-whole", **fields_of(case)))
    wait(lambda: state(run) != "running")
    assert state(run) == "finished", run.log.read_text()[-3000:]
    return run


def write_table(folder):
    "docs/generated/kills.md from docs/kills.jsonl."
    lines = [json.loads(line) for line in (folder / "kills.jsonl").read_text().splitlines()]
    head = ("case", "kills", *WHO, "inside a save", "inside an export", "starts")
    head += ("numbers missing", "largest deviation", "orphans", "slowest end, s")
    rows = []
    for case in [*CASES, "all"]:
        if mine := [line for line in lines if case in ("all", line["case"])]:
            who = [sum(line["who"].get(name, 0) for line in mine) for name in WHO]
            inside = [sum(line["moments"].get(name, 0) for line in mine) for name in WHEN[1:]]
            total = {k: sum(line[k] for line in mine) for k in ("kills", "starts", "missing")}
            rows.append(
                (case, total["kills"], *who, *inside, total["starts"], total["missing"])
                + (f"{max(line['deviation'] for line in mine):.1e}",)
                + (sum(line["orphans"] for line in mine), max(line["slowest"] for line in mine))
            )
    dates = sorted({line["date"] for line in lines})
    cores = sorted({line["cores"] for line in lines})
    text = f"""# Kills of real runs

Tiny models on machines with {", ".join(map(str, cores))} CPU cores, two processes unless
`single`, started as `launch` starts them;
SIGKILL to one process, chosen at random, or to all. `numbers missing` counts losses and gradient
norms of any step that the record lacks at the end; the deviation is relative to a run that was
never killed; an orphan is a process that lived on for more than {GONE} s. {dates[0]} to
{dates[-1]}, torch {", ".join(sorted({line["torch"] for line in lines}))}.

    python tests/tools/kills.py --kills 100

"""
    table = [head, ("---",) * len(head), *rows]
    text += "\n".join("| " + " | ".join(map(str, row)) + " |" for row in table) + "\n"
    (folder / "generated").mkdir(exist_ok=True)
    (folder / "generated" / "kills.md").write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--table", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    given.table.mkdir(parents=True, exist_ok=True)
    cases = given.case or list(CASES)
    rng, done, references = random.Random(given.seed), 0, {}
    end = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        while done < given.kills and time.monotonic() < end:
            case = next((case for case in cases if case not in references), None)
            case = case or rng.choice(cases)
            if case not in references:
                references[case] = whole_run(folder, case)
            series = Series(folder, case, rng)
            while series.life():
                pass
            line = series.line(references[case])
            shutil.rmtree(series.run.path)
            done += line["kills"]
            with open(given.table / "kills.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            write_table(given.table)
            print(f"{done} kills: {line}", flush=True)


if __name__ == "__main__":
    main()
