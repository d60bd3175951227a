"""What a recipe accepts is read: accesses are recorded in tiny runs of each objective."""

import os
import sys

import forked
import pytest

from sciftune.core.recipe import Recipe
from sciftune.core.recipe_fields import Fields, why_unread
from sciftune.core.registry import records
from sciftune.core.rundir import RunDir
from sciftune.planner.plan import plan

TINY = dict(
    steps=2,
    micro_batch=1,
    figures=24,
    validation_steps=1,
    validation_images=1,
    checkpoint_steps=1,
    warmup_steps=1,
)
CASES = dict(  # the objectives, with their switches on
    flow=[
        dict(model="qwenimage", lora_rank=4, lora_dropout=0.1),
        dict(model="qwenimage", fit="bucket", random_hw_adapt=True, ema_decay=0.5),
    ],
    epsilon=[dict(model="sd15"), dict(model="sd15", lora_rank=4)],
    autoencoder=[dict(model="qwenimage", ema_decay=0.5)],
    dmd2=[
        dict(model="sd15", lora_rank=4, generator_every=1),
        dict(model="sd15", denoising_steps=2, generator_every=1, ema_decay=0.5),
        dict(model="sd15", gan=True, resolution=256, generator_every=1, validation_steps=0),
    ],
    dmd_decoupled=[dict(model="sd15", generator_every=1)],
    flow_grpo=[
        dict(model="qwenimage", group_size=2, lora_rank=4),
        dict(model="qwenimage", group_size=2, ema_decay=0.5),
    ],
    diffusion_dpo=[
        dict(model="qwenimage", group_size=2, lora_rank=4),
        dict(model="qwenimage", group_size=2, ema_decay=0.5),
    ],
    unified=[dict(model="bagel", lora_rank=4), dict(model="bagel", ema_decay=0.5)],
)
ELSEWHERE = dict(  # who reads it, where no run on this machine does
    name="the launcher makes the folder",
    plan_check="the launcher refuses",
    launcher="launch.ipynb decides with it who starts the job",
    optimizer="only a GPU has a choice",
    gradient_release="only the optimizer of a GPU releases gradients",
    profile_block="only a GPU can time a block",
    host_memory_gib="the plan of a machine with GPUs",
    nccl_ib_disable="the environment of the command",
    nccl_p2p_disable="the environment of the command",
    reduce_type="more than one process of fsdp",
    prefetch="more than one process of fsdp",
    hybrid_shard="more than one process of fsdp",
    shard_states="more than one process of ddp",
    machine_rank="several machines",
    main_process_ip="several machines",
    nvme_path="offload='nvme'",
    max_shard_size="the export of a denoiser",
    start_from_ema="start_from",
    stop_if_diverged="a run that diverges",
    lora_base="narrow storage of the base, see test_lora",
)
VALIDATION = ("sciftune.core.presets", "sciftune.core.aliases")


def _validates(frame):
    "Whether this access only checks the recipe, or compares two."
    module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    checks = function.startswith(("_", "check", "why", "unread", "is_on", "changed", "identity"))
    return module in VALIDATION or (
        checks and (module == "sciftune.core.recipe" or module.endswith(".section"))
    )


@pytest.fixture
def seen(monkeypatch, tmp_path):
    "A function that gives the fields read so far, by this process and those forked from it."
    journal, known = tmp_path / "seen.txt", set()
    plain, names = Recipe.__getattribute__, Recipe.model_fields.keys()

    def recorded(self, name):
        if name in names and name not in known and not _validates(sys._getframe(1)):
            known.add(name)
            file = os.open(journal, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.write(file, f"{name}\n".encode())
            os.close(file)
        return plain(self, name)

    monkeypatch.setattr(Recipe, "__getattribute__", recorded)
    return lambda: set(journal.read_text().split())


def run(tmp_path, name, **fields):
    "Plan, train, validate, keep and export."
    folder = RunDir(tmp_path / name)
    forked.train(folder, **fields)
    plan(Recipe.load(folder.recipe))


def readable(objective):
    "The fields that a run of this objective on one process may read, with all switches on."
    values = dict(Fields(objective=objective))
    found = {n for n in values if "does not read it" not in why_unread(n, values)}
    return found - ELSEWHERE.keys()


def objectives():
    "Return all objectives, slow but for the two that take least; fields of all runs are in both."
    always = ("autoencoder", "dmd_decoupled")
    return [o if o in always else pytest.param(o, marks=pytest.mark.slow) for o in CASES]


@pytest.mark.parametrize("objective", objectives())
def test_what_an_objective_accepts_is_read(objective, seen, tmp_path):
    for number, case in enumerate(CASES[objective]):
        own = dict(objective=objective, global_batch=2)
        run(tmp_path, f"{objective}-{number}", **TINY | own | case)
    unseen = readable(objective) - seen()
    cases = [dict(case, objective=objective) for case in CASES[objective]]
    assert not sorted(name for name in unseen if not _switch_is_off(name, cases))


def _switch_is_off(name, cases):
    "Return whether no case has the switch that this field needs."
    full = [dict(Fields(**case)) for case in cases]
    return all("without it" in why_unread(name, values) for values in full)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_what_a_strategy_accepts_is_read(strategy, seen, tmp_path):
    run(
        tmp_path,
        strategy,
        model="qwenimage",
        strategy=strategy,
        num_processes=2,
        global_batch=2,
        **TINY,
    )
    reads = set(records("strategies")[strategy].reads) - {"lora_base", "nvme_path"}
    assert not reads - seen()
