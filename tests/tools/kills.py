"""Kill real runs at random moments, resume them, and add what happened to docs/kills.jsonl.

    python tests/tools/kills.py [--kills 100] [--minutes 600] [--jobs 1] [--case NAME ...]
                                [--table FOLDER] [--seed NUMBER] [--gpus] [--term]

`--jobs` runs at once, in processes of one program. It ends after the runs in which that many kills
are reached. Shortly before so many minutes have passed it stops killing, and lets every run come
to its end; what has not ended a minute after them is cut off, and its line says so. `--gpus` trains
on the GPUs of the machine instead of its CPU; all jobs share them. `--term` sends SIGTERM, as a
cluster does before it takes a machine back, to the agent or all processes: each run
must then say that it was stopped, without a traceback, and end with a checkpoint.

Every run is started as `launch` starts it. One of its processes, or all, get SIGKILL: the agent
(launcher), a rank, a process that makes batches; while it starts, after some steps,
inside a save or inside the export. Then the run is resumed, until it ends. A run that was never
killed is the reference of all runs of its case: every step must be there, with the same losses and
gradient norms, and after each kill all processes must be gone within ten seconds. A line is added
for each run that has ended, and docs/generated/kills.md is written from all lines, so that a series
can be stopped at any time. A run that does not end well leaves its log in kills.err beside the
lines, the others go on, and the exit code is 1.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import psutil
import torch
from forked import ENGINES
from jobs import begin, living, processes_of, recipe_in, wait

from sciftune.core.rundir import RunDir, gpus
from sciftune.lab.jobs import state

ROOT = Path(__file__).resolve().parents[2]
GONE = 10  # seconds until every process of a killed run must have ended
STOPPED = 60  # the same where it was asked to stop, and writes a checkpoint first
KILLS_OF_A_RUN, EXPORTS_OF_A_RUN = 12, 2  # a run that is to be exported makes no more steps
OPENING = 15  # seconds that a start takes, about
GRACE = 60  # seconds that runs get beyond their time
UNKNOWN = 90  # seconds that a run is taken for before one of its case has ended
WHO = ("rank", "agent", "worker", "all")
ASKED = ("agent", "all")  # who gets SIGTERM
WHEN = {"step": 4, "save": 3, "start": 2, "export": 1}  # and how often, of ten kills
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


def fields_of(case, cpu):
    "The fields of the recipe of a case."
    fields = COMMON | CASES[case] | dict(cpu=cpu)
    return {name: value for name, value in fields.items() if value is not None}


def names_of_gpus():
    "The GPUs of this machine, in words; found without a use of CUDA, which forks do not survive."
    found = Counter(gpu["name"] for gpu in gpus())
    return ", ".join(f"{count} × {name}" for name, count in found.items())


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


class Seen:
    "What can be seen of a run from outside."

    def __init__(self, run):
        self.run, self.asked, self.runs = run, 0.0, True

    @property
    def saving(self):
        "Whether it is inside a save."
        return half_written(self.run.checkpoints, ".step_*")

    @property
    def exporting(self):
        "Whether it is inside its export."
        return half_written(self.run.path, f".{self.run.model.name}.*")

    @property
    def running(self):
        "Whether it runs, asked ten times a second."
        if self.runs and time.monotonic() > self.asked + 0.1:
            self.asked, self.runs = time.monotonic(), state(self.run) == "running"
        return self.runs


def moment(run, when, rng, deadline):
    "Wait for the moment to kill; which it is, None when the run or the time ends before."
    begun, seen = steps_done(run), Seen(run)
    at = time.monotonic() + rng.random() * OPENING if when == "start" else None
    ahead, pause = rng.randint(1, 12), 0.05 if when == "step" else 0.005
    while time.monotonic() < deadline and seen.running:
        if seen.exporting or (when == "save" and seen.saving):
            break
        if at is not None and time.monotonic() >= at:
            break
        if when == "step" and steps_done(run) >= begun + ahead:
            break
        time.sleep(pause)
    else:
        return None
    if at is None:
        time.sleep(rng.random() * {"step": 0.3, "save": 0.02, "export": 0.1}[when])
    if state(run) != "running":
        return None
    if seen.exporting or seen.saving:
        return "export" if seen.exporting else "save"
    return "step" if steps_done(run) > begun else "start"


def kill(run, who, rng, signal_number):
    "Send the signal; who got it."
    found = processes_of(run) | dict(all=living(run))
    for name in (who, "rank", "agent"):  # a run has no such process, or not yet
        if victims := found[name]:
            for process in victims if name == "all" else [rng.choice(victims)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal_number)
            return name


def seconds_until_gone(run, limit=GONE):
    "How long processes of `run` live on, and how many have to be ended after all."
    began = time.monotonic()
    while (left := living(run)) and time.monotonic() < began + limit:
        time.sleep(0.05)
    taken = time.monotonic() - began
    for process in left:
        process.kill()
    wait(lambda: not living(run))
    return taken, len(left)


class Series:
    "A run that is killed and resumed until its end, and what happened to it."

    def __init__(self, folder, case, rng, gpu_names, term):
        self.case, self.rng, self.gpu_names, self.term = case, rng, gpu_names, term
        name = f"{case.replace(', ', '-')}-{rng.getrandbits(32):x}"
        self.recipe = recipe_in(folder, name, **fields_of(case, not gpu_names))
        self.who, self.moments = Counter(), Counter()
        self.slowest, self.orphans, self.starts = 0.0, 0, 0

    @property
    def kills(self):
        "How many there were."
        return sum(self.who.values())

    @property
    def again(self):
        "Whether it is killed once more."
        return self.kills < KILLS_OF_A_RUN and self.moments["export"] < EXPORTS_OF_A_RUN

    def life(self, deadline, cut):
        "Start or resume the run; whether it was killed, or is still running at `cut`."
        resume = "latest" if self.kills else self.recipe.resume
        self.run = run = begin(self.recipe.model_copy(update=dict(resume=resume)))
        self.starts += 1
        wanted = self.rng.choices(list(WHEN), WHEN.values())[0]
        when = moment(run, wanted, self.rng, deadline) if self.again else None
        what = signal.SIGTERM if self.term else signal.SIGKILL
        chosen = self.rng.choice(ASKED if self.term else WHO)
        if when and (who := kill(run, chosen, self.rng, what)):
            self.who[who] += 1
            self.moments[when] += 1
            taken, left = seconds_until_gone(run, STOPPED if self.term else GONE)
            if self.term:
                self.check_stopped(when)
            self.slowest = max(self.slowest, taken)
            self.orphans += left
            return time.monotonic() < cut
        wait(lambda: state(run) != "running" or time.monotonic() > cut)
        return False

    def check_stopped(self, when):
        "A request to stop is no failure."
        log = self.run.log.read_text()
        told = state(self.run)
        assert told in ("stopped", "finished") or when == "start", (told, log[-6000:])
        assert "Traceback" not in log, log[-6000:]

    def line(self, reference):
        "Its line, when it has ended."
        run = self.run
        assert state(run) == "finished", run.log.read_text()[-6000:]
        assert any(run.model.iterdir()), "nothing was exported"
        got, want = numbers(run), numbers(reference)
        both = got.keys() & want.keys()
        return self.facts() | dict(
            missing=len(want.keys() - got.keys()),
            deviation=max(abs(got[k] - want[k]) / max(abs(want[k]), 1e-12) for k in both),
        )

    def facts(self):
        "What a line says of any run."
        where = dict(gpus=self.gpu_names) if self.gpu_names else {}
        asked = dict(signal="SIGTERM") if self.term else {}
        return (
            where
            | asked
            | dict(
                case=self.case,
                kills=self.kills,
                who=dict(self.who),
                moments=dict(self.moments),
                starts=self.starts,
                orphans=self.orphans,
                slowest=round(self.slowest, 1),
                date=str(datetime.date.today()),
                torch=torch.__version__,
                cores=os.cpu_count(),
            )
        )

    def end(self):
        "End what is left of the run, and remove its folder."
        for process in living(self.run):
            process.kill()
        wait(lambda: not living(self.run))
        shutil.rmtree(self.run.path)


def whole_name(case):
    "The name of the run of a case that nobody kills."
    return f"{case.replace(', ', '-')}-whole"


def whole_run(folder, case, cut, gpu_names):
    "Train it; raises TimeoutError when it is still running at `cut`."
    run = begin(recipe_in(folder, whole_name(case), **fields_of(case, not gpu_names)))
    wait(lambda: state(run) != "running" or time.monotonic() > cut)
    if state(run) == "running":
        for process in living(run):
            process.kill()
        raise TimeoutError(f"at step {steps_done(run)} when the time was over")
    assert state(run) == "finished", run.log.read_text()[-6000:]


PLACES = dict(start="a start", save="a save", export="an export")


HEAD = ("case", "kills", *WHO, *(f"in {PLACES[name]}" for name in PLACES), "starts")
HEAD += ("numbers missing", "largest deviation", "orphans", "slowest end, s")


def table_of(lines):
    "A table of these lines, with a row for each case."
    rows = []
    for case in [*CASES, "all"]:
        if mine := [line for line in lines if case in ("all", line["case"])]:
            who = [sum(line["who"].get(name, 0) for line in mine) for name in WHO]
            inside = [sum(line["moments"].get(name, 0) for line in mine) for name in PLACES]
            total = {k: sum(line[k] for line in mine) for k in ("kills", "starts", "missing")}
            rows.append(
                (case, total["kills"], *who, *inside, total["starts"], total["missing"])
                + (f"{max(line['deviation'] for line in mine):.1e}",)
                + (sum(line["orphans"] for line in mine), max(line["slowest"] for line in mine))
            )
    table = [HEAD, ("---",) * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in table) + "\n"


def said_of(lines, name):
    "The values of `name` in these lines, in words."
    return ", ".join(map(str, sorted({line[name] for line in lines})))


def write_table(folder):
    "docs/generated/kills.md from docs/kills.jsonl."
    lines = [json.loads(line) for line in (folder / "kills.jsonl").read_text().splitlines()]
    cut = [line for line in lines if line.get("cut")]
    lines = [line for line in lines if not line.get("cut")]
    if not lines:
        return
    asked = [line for line in lines if line.get("signal")]
    killed = [line for line in lines if not line.get("signal")]
    on_gpus = [line for line in killed if line.get("gpus")]
    on_cpus = [line for line in killed if not line.get("gpus")]
    dates = sorted({line["date"] for line in lines})
    text = f"""# Kills of real runs

Tiny models, two processes unless `single`, started as `launch` starts them;
SIGKILL to one process, chosen at random, or to all. `numbers missing` counts losses and gradient
norms of any step that the record lacks at the end; the deviation is relative to a run that was
never killed; an orphan is a process that lived on for more than {GONE} s. {dates[0]} to
{dates[-1]}.

    python tests/tools/kills.py --kills 100

"""
    if cut:
        text += f"""Not in the tables: {sum(line["kills"] for line in cut)} kills of {len(cut)} runs
that were cut off by the end of their time before they could show that nothing was lost.

"""
    if on_cpus:
        on = f"Machines with {said_of(on_cpus, 'cores')} CPU cores"
        text += f"{on}, torch {said_of(on_cpus, 'torch')}.\n\n{table_of(on_cpus)}"
    if on_gpus:
        on = f"{said_of(on_gpus, 'gpus')} (`--gpus`), several runs at once"
        text += f"\n{on}, torch {said_of(on_gpus, 'torch')}.\n\n{table_of(on_gpus)}"
    if asked:
        on = f"SIGTERM (`--term`; an orphan is one after {STOPPED} s), "
        on += f"{said_of(asked, 'cores')} CPU cores"
        text += f"\n{on}, torch {said_of(asked, 'torch')}.\n\n{table_of(asked)}"
    (folder / "generated").mkdir(exist_ok=True)
    (folder / "generated" / "kills.md").write_text(text)


class Shared:
    "What the processes that run series know of each other."

    def __init__(self, given, folder):
        self.given, self.folder, self.cases = given, folder, given.case or list(CASES)
        self.gpu_names = names_of_gpus() if given.gpus else ""
        context = multiprocessing.get_context("fork")
        self.lock, self.kills = context.Lock(), context.Value("i", 0, lock=False)
        count = len(self.cases)
        self.active = context.Array("i", count, lock=False)  # runs of a case at this moment
        self.spent = context.Array("d", count, lock=False)  # seconds that a case has had
        self.whole = context.Array("d", count, lock=False)  # seconds of a reference; -1: failed
        self.claimed = context.Array("i", count, lock=False)  # whether a reference has begun
        self.failures = context.Value("i", 0, lock=False)
        imports = time.time() - psutil.Process().create_time()  # count, too
        self.end = time.monotonic() + 60 * given.minutes - imports
        self.workers = [context.Process(target=work, args=(self, j)) for j in range(given.jobs)]

    def deadline(self, at):
        "When kills of a run end, so that it can end in time."
        whole = self.whole[at]
        return self.end - (1.3 * whole if whole > 0 else UNKNOWN)

    def claim(self):
        "Which case comes next, and whether it is its reference; None when all is done."
        with self.lock:
            if self.kills.value >= self.given.kills:
                return None
            places = range(len(self.cases))
            begun = [at for at in places if self.claimed[at] and self.wants(at)]
            if all(self.active[at] or self.spent[at] for at in begun):
                for at in places:
                    if not self.claimed[at] and time.monotonic() < self.deadline(at):
                        self.claimed[at] = 1
                        return at, True
            at = min(begun, key=lambda at: (self.active[at], self.spent[at]), default=None)
            if at is not None:
                self.active[at] += 1
                return at, False

    def wants(self, at):
        "Whether another run of a case would get its kills."
        return self.whole[at] >= 0 and time.monotonic() < self.deadline(at) - 30

    def add(self, line):
        "Write a line and the table."
        table = self.given.table
        with self.lock, open(table / "kills.jsonl", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another series may write into it
            file.write(json.dumps(line) + "\n")
            file.flush()
            write_table(table)
            self.kills.value += 0 if line.get("cut") else line["kills"]
            print(f"{self.kills.value} kills: {line}", flush=True)

    def fail(self, case):
        "Keep the error that is being handled."
        with self.lock, open(self.given.table / "kills.err", "a") as file:
            self.failures.value += 1
            file.write(f"{'=' * 30} {case}\n{traceback.format_exc()}\n")
        print(f"FAILED: {case}, see kills.err", flush=True)

    def reference(self, at):
        "Train the reference of a case."
        began = time.monotonic()
        try:
            whole_run(self.folder, self.cases[at], self.end + GRACE, self.gpu_names)
            self.whole[at] = time.monotonic() - began
        except BaseException:
            self.whole[at] = -1
            raise

    def series(self, at, rng):
        "One run, killed until its end."
        case, began, cut = self.cases[at], time.monotonic(), self.end + GRACE
        series = Series(self.folder, case, rng, self.gpu_names, self.given.term)
        try:
            while series.life(self.deadline(at), cut):
                pass
            wait(lambda: self.whole[at] or time.monotonic() > cut)
            if time.monotonic() > cut or self.whole[at] <= 0:
                self.add(series.facts() | dict(cut=True))
            elif series.kills:
                self.add(series.line(RunDir(Path(self.folder) / whole_name(case))))
        except Exception as error:
            error.add_note(str(series.facts()))
            raise
        finally:
            with self.lock:
                self.active[at] -= 1
                self.spent[at] += time.monotonic() - began
            series.end()


def work(shared, number):
    "One process: a reference or a series after another."
    rng = random.Random(f"{shared.given.seed} {number}")
    while (found := shared.claim()) is not None:
        at, reference = found
        try:
            shared.reference(at) if reference else shared.series(at, rng)
        except Exception:
            shared.fail(shared.cases[at])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--gpus", action="store_true", help="train on this machine's GPUs")
    parser.add_argument("--term", action="store_true", help="SIGTERM instead of SIGKILL")
    parser.add_argument("--table", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    given.table.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shared = Shared(given, folder)
        for worker in shared.workers:
            worker.start()
        for worker in shared.workers:
            worker.join()
    print(f"{shared.kills.value} kills, {shared.failures.value} runs failed", flush=True)
    return min(shared.failures.value, 1)


if __name__ == "__main__":
    sys.exit(main())
