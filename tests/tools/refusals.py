"""Bad inputs, each with the one sentence that a user sees.

    python tests/tools/refusals.py     writes docs/generated/refusals.md

The same table is tried by tests/test_refusals.py. Everything happens in this process: nothing is
started or trained, because each input is refused before.
"""

import contextlib
import errno
import functools
import io
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from additions import added
from PIL import Image
from safetensors.torch import save

from sciftune.core.files import user_folder
from sciftune.core.plan import Plan, PlanRow
from sciftune.core.recipe import RecipeError, resolve
from sciftune.core.registry import RegistryError
from sciftune.data.images import DataError
from sciftune.data.prompts import own_prompts
from sciftune.data.sources import open_collection
from sciftune.data.splits import open_recipe_data
from sciftune.lab import compare, evaluate, prepare, sample

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/generated/refusals.md"
EXPLAINED = (prepare.LaunchError, RecipeError, RegistryError, DataError, ValueError, SystemExit)


@dataclass(frozen=True)
class Case:
    """An input that is refused."""

    topic: str  # Heading on the page
    wrong: str  # What is given, for people
    says: str  # What the sentence must hold: the field, file or row, and what would be right
    give: Callable[[Path], object]  # (scene): gives it, and is refused
    kinds: tuple[type[BaseException], ...] = field(default=EXPLAINED)


# The scene: what the cases find on the disk


def png(side: int = 16) -> bytes:
    """A grey square."""
    made = io.BytesIO()
    Image.new("RGB", (side, side), "grey").save(made, "PNG")
    return made.getvalue()


@contextlib.contextmanager
def scene() -> Iterator[Path]:
    """A folder with a finished run, checkpoints good and bad, and files that are none of these."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name).resolve()
        (folder / "file").write_text("no folder")
        (folder / "empty").mkdir()
        finished = resolve(run_root=str(folder / "runs"), name="done", lr_schedule="cosine")
        finished = prepare.with_absolute_paths(finished)
        for run in ("done", "damaged", "not-finite", "cut", "unnamed"):
            step = folder / "runs" / run / "checkpoints" / "step_000100"
            step.mkdir(parents=True)
            kept = finished.model_copy(update=dict(name=run))
            kept.save(step.parents[1] / "recipe.yaml")
            (step.parents[1] / "metrics.jsonl").write_text("{}\n")
            (step / "tensors").write_bytes(b"1234")
            record = dict(recipe=kept.model_dump(mode="json"), data="abc", files={"tensors": 4})
            record |= dict(finite=False, not_finite=["denoiser"]) if run == "not-finite" else {}
            record |= dict(files={"tensors": 8}) if run == "cut" else {}
            record |= dict(recipe=None) if run == "unnamed" else {}
            text = "{" if run == "damaged" else json.dumps(record)
            (step / "info.json").write_text(text)
        yield folder


@contextlib.contextmanager
def written(folder: Path, files: dict[str, bytes]) -> Iterator[Path]:
    """A folder with these files, for a while."""
    place = folder / "given"
    place.mkdir()
    for file, content in files.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes(content)
    try:
        yield place
    finally:
        shutil.rmtree(place)


# Ways to give something


def never_planned(*_: object) -> None:
    """Stands in for the planner: what reaches it was not refused."""
    raise AssertionError("not refused before the plan")


def launched(folder: Path, **given: object) -> None:
    """As the launch notebook does, up to the plan; '{folder}' in a value is the scene."""
    values = {
        name: value.format(folder=folder) if isinstance(value, str) else value
        for name, value in given.items()
    }
    planner, prepare.plan_run = prepare.plan_run, never_planned
    try:
        recipe = prepare.recipe_from(dict(preset="tiny", run_root=str(folder / "runs")) | values)
        prepare.prepare_run(recipe)
    finally:
        prepare.plan_run = planner


def planned(folder: Path, **given: object) -> None:
    """A launch whose plan is made, in this process."""

    values = {n: v.format(folder=folder) if isinstance(v, str) else v for n, v in given.items()}
    prepare.prepare_run(resolve(run_root=str(folder / "runs"), **values))


def asked(topic: str, says: str, **given: object) -> Case:
    """A launch with parameters; those that need the model reach the plan."""
    give = planned if topic in ("Layers and adapters", "Engines") else launched
    values = {n: shlex.quote(str(v).format(folder="FOLDER")) for n, v in given.items()}
    words = " ".join(f"-p {n} {v}" for n, v in values.items())
    return Case(topic, f"`{words}`", says, functools.partial(give, **given))


def adapter(wrong: str, says: str, *keys: str) -> Case:
    """Adapters in a file, with these tensors more, as `lora_path`."""

    def give(folder: Path) -> None:
        tensors = {key: torch.ones(4, 32) for key in keys}
        layer = "transformer.transformer_blocks.0.attn.to_q"
        tensors[f"{layer}.lora_A.weight"] = torch.ones(4, 32)
        tensors[f"{layer}.lora_B.weight"] = torch.ones(32, 4)
        with written(folder, {"lora.safetensors": save(tensors)}) as place:
            planned(folder, lora_rank=4, lora_path=str(place / "lora.safetensors"))

    return Case("Layers and adapters", wrong, says, give)


def system_says(number: int) -> Callable[[Path], None]:
    """A launch whose new run folder the system refuses with an error number."""

    def give(folder: Path) -> None:
        def refused(recipe: object) -> None:
            raise OSError(number, os.strerror(number), str(folder / "runs" / "new"))

        plain, prepare.new_run = prepare.new_run, refused
        try:
            launched(folder, name="new")
        finally:
            prepare.new_run = plain

    return give


def disk_too_small(folder: Path) -> None:
    """A plan whose checkpoint is larger than what is free on the disk."""
    row = PlanRow(fits=True, checkpoint_gib=101.5)
    small = Plan(run=row, disk_free_gib=63.4)
    with mock.patch.object(prepare, "in_child", return_value=small):
        prepare.plan_run(resolve(run_root=str(folder)), folder / "plan.json")


def port_taken(folder: Path) -> None:
    """A launch over two processes at a port where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        try:
            launched(folder, strategy="ddp", num_processes=2, cpu=True, main_process_port=port)
        except prepare.LaunchError as error:
            raise prepare.LaunchError(str(error).replace(str(port), "PORT")) from None


def collection(wrong: str, says: str, files: dict[str, bytes], name: str = "") -> Case:
    """A folder of data with these files; `name` = the one of them that is opened."""

    def give(folder: Path) -> None:
        with written(folder, files) as place:
            open_collection(place / name)

    return Case("Data", wrong, says, give)


def shown(wrong: str, says: str, files: dict[str, bytes], **given: object) -> Case:
    """A recipe whose data, masks and file of prompts are read as the launch and the ranks do."""

    def give(folder: Path) -> None:
        with written(folder, files) as place:
            values = {n: str(v).format(folder=place) for n, v in given.items()}
            recipe = resolve(data=str(place), run_root=str(place / "runs"), **values)
            own_prompts(recipe, verify=True)
            open_recipe_data(recipe)

    return Case("Data", wrong, says, give)


def pipe(folder: Path) -> None:
    """A named pipe that nobody writes to."""
    file = folder / "pipe.parquet"
    if not file.exists():
        os.mkfifo(file)
    open_collection(file)


def listed(*rows: dict, suffix: str = "jsonl") -> dict[str, bytes]:
    """A picture and a list that should name it."""
    lines = "\n".join(json.dumps(row) for row in rows)
    return {"a.png": png(), f"metadata.{suffix}": lines.encode()}


def table(**columns: list) -> bytes:
    """A parquet file."""
    made = io.BytesIO()
    pq.write_table(pa.table(columns), made, compression="zstd")
    return made.getvalue()


def tar(size: int | None = None) -> bytes:
    """A tar of a picture and its caption, or its first bytes."""
    import tarfile

    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as opened:
        for name, content in (("a.png", png()), ("a.txt", b"a square")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return made.getvalue()[:size]


def model_folder(wrong: str, says: str, files: dict[str, str], weights: bool = False) -> Case:
    """A folder given as model_path for klein, with these files."""

    def give(folder: Path) -> None:
        from sciftune.models.family import get_family

        with written(folder, {name: text.encode() for name, text in files.items()}) as place:
            family = get_family("klein")
            family.denoiser_weights(place) if weights else family.config(place)

    return Case("Model folder", wrong, says, give)


def tiny_model(wrong: str, says: str, damage: Callable[[Path], object]) -> Case:
    """Qwen-Image's stand-in, all of which a run reads, after `damage` of its folder."""

    def give(folder: Path) -> None:
        from sciftune.models.family import get_family

        family = get_family("qwenimage")
        whole = family.tiny(folder / "whole")
        place = folder / "given"
        shutil.copytree(whole, place)
        try:
            damage(place)
            family.check_schedule(place)
            family.load_encoders(place)
            family.load_denoiser(place)
        finally:
            shutil.rmtree(place)

    return Case("Model folder", wrong, says, give)


def lent_model(wrong: str, says: str, model: str, damage: Callable[[Path], object]) -> Case:
    """A launch with a family's stand-in as model_path, after `damage` of its folder."""

    def give(folder: Path) -> None:
        from sciftune.models.family import get_family

        whole = get_family(model).tiny(folder / f"whole-{model}")
        place = folder / "given"
        shutil.copytree(whole, place)
        try:
            damage(place)
            planned(folder, model=model, model_path=str(place), name="damaged-model", cpu=True)
        finally:
            shutil.rmtree(place)

    return Case("Model folder", wrong, says, give)


def removed(file: str) -> Callable[[Path], object]:
    """Takes a file away."""
    return lambda folder: (folder / file).unlink()


def cut(file: str) -> Callable[[Path], object]:
    """Leaves the first half of a file."""

    def halve(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2])

    return halve


def changed(file: str, **values: object) -> Callable[[Path], object]:
    """Puts values into a configuration of a model folder."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | values))

    return change


def stored_otherwise(file: str, change: Callable[[dict, str], None]) -> Callable[[Path], object]:
    """Changes the first tensor of a weight file: `change` gets all tensors and its name."""

    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / file)
        change(tensors, min(tensors))
        (folder / file).unlink()
        save_file(tensors, folder / file)

    return rewrite


def in_bytes(tensors: dict, name: str) -> None:
    """As 8-bit numbers without their scales."""
    import torch

    tensors[name] = tensors[name].to(torch.int8)


def renamed(tensors: dict, name: str) -> None:
    """Under a name that nothing asks for."""
    tensors["unknown"] = tensors.pop(name)


def dataset_folder(wrong: str, says: str, file: str, content: str | None) -> Case:
    """A folder of `save_to_disk` in which a file has this content, or is not there."""

    def give(folder: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        place = folder / "given"
        rows = dict(image=[dict(bytes=png(), path=None)], text=["a square"])
        features = datasets.Features(image=datasets.Image(), text=datasets.Value("string"))
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(place)
        try:
            (place / file).unlink() if content is None else (place / file).write_text(content)
            open_collection(place)
        finally:
            shutil.rmtree(place)

    return Case("Data", wrong, says, give)


def address(url: str, says: str) -> Case:
    """Shards behind an address."""
    return Case("Data", f"`-p data {url}`", says, lambda folder: open_collection(url))


def weights_index(wrong: str, says: str, text: str) -> Case:
    """A model folder whose weights are in several files, with this index."""
    index = "transformer/diffusion_pytorch_model.safetensors.index.json"
    return model_folder(wrong, says, {"model_index.json": KLEIN, index: text}, weights=True)


def command(name: str, says: str, *words: str) -> Case:
    """A command line of the converters."""

    def give(folder: Path) -> None:
        from sciftune.lab import convert

        call = dict(zero_to_bf16=convert.convert_command, merge_lora=convert.merge_command)[name]
        call([word.format(folder=folder) for word in words])

    shown = " ".join(("scripts/" + name, *words)).replace("{folder}", "FOLDER")
    return Case("Converters", f"`{shown}`", says, give)


def used(words: str, says: str, call: Callable[[Path], object]) -> Case:
    """Parameters of another command than `run`, refused by the function that takes them."""
    return Case("Other commands", f"`sciftune {words}`", says, call)


def odd_samples(folder: Path) -> None:
    """A folder for pictures in which another program has written samples.json."""
    with written(folder, {"samples.json": b"{}"}) as place:
        sample.listed_samples(place)


def broken_link(folder: Path) -> None:
    """A link as folder of results, whose target is gone."""
    (folder / "link").symlink_to("nowhere")
    try:
        user_folder(folder / "link")
    finally:
        (folder / "link").unlink()


# The table

KLEIN = json.dumps(dict(_class_name="Flux2KleinPipeline", transformer=["diffusers", "x"]))
OTHER = {"model_index.json": '{"_class_name": "FluxPipeline"}', "transformer/config.json": "{}"}
CASES = [
    asked("Recipe", "unknown parameter 'modle' (did you mean 'model'?)", modle="klein"),
    asked("Recipe", "model: unknown 'qwen' (did you mean 'qwenimage'?)", model="qwen"),
    asked("Recipe", "preset: unknown 'tinny' for model 'qwenimage'", preset="tinny"),
    asked(
        "Recipe", "preset: 'edit' is not for model 'sd15'; it is for", model="sd15", preset="edit"
    ),
    asked("Recipe", "steps: Input should be a valid integer", steps="abc"),
    asked("Recipe", "steps: must be a number", steps=True),
    asked("Recipe", "steps: must be at least 1; got 0", steps=0),
    asked("Recipe", "learning_rate: Input should be a finite number", learning_rate=float("inf")),
    asked("Recipe", "resolution: must be a multiple of 16, for example 96", resolution=100),
    asked("Recipe", "strategy: unknown 'zero9' (did you mean", strategy="zero9"),
    asked("Recipe", "objective: 'epsilon' does not suit qwenimage", objective="epsilon"),
    asked("Recipe", "global_batch: 6 is not a multiple", global_batch=6, micro_batch=4),
    asked("Recipe", "lora_alpha: needs lora_rank", lora_alpha=8),
    asked("Recipe", "needs strategy 'fsdp'; 'single' does not read it", prefetch=2),
    asked("Recipe", "use 'ddp', 'fsdp'", num_processes=2),
    asked("Recipe", "main_process_ip: needed with num_machines > 1", num_machines=2),
    asked("Recipe", "slurm_time: must be as sbatch takes it, for ex", slurm_time="two days"),
    asked("Recipe", "slurm_memory: must be as sbatch takes it, for ex", slurm_memory="a lot"),
    asked("Recipe", "metadata: must be a .json, .jsonl or .csv file", metadata="list.txt"),
    asked("Recipe", "needs a positive weight behind a colon", data="a:1,other"),
    asked("Recipe", "trackers: unknown tracker", trackers="tensorbord"),
    asked("Recipe", "precision='bf16-master24', whose optimizer", use_8bit_adam=True),
    asked("Recipe", "the objective computes a step", train_iteration_func="my_iteration"),
    asked("Recipe", "write validation_steps and validation_prompts", validation_func="my_function"),
    asked("Recipe", "use_deepspeed: says no stage; write zero_stage=2 or 3", use_deepspeed=True),
    asked("Recipe", "FSDP2 no longer has it: prefetch=1", fsdp_forward_prefetch=True),
    asked("Recipe", "is no block of klein", model="klein", fsdp_transformer_layer_cls_to_wrap="A"),
    asked("Recipe", "accelerate_config: no.yaml is missing", accelerate_config="no.yaml"),
    asked("Recipe", "fit: needs objective", model="sd15", objective="dmd2", fit="pad"),
    asked("Recipe", "'bucket', 'pad' or 'crop'", fit="squash"),
    asked("Recipe", "max_shard_size: must be a size, for example 10GB", max_shard_size="much"),
    asked("Recipe", "max_shard_size: must be more than nothing", max_shard_size="0"),
    asked("Recipe", "'pipeline' or a positive number", timestep_shift="inf"),
    asked("Recipe", "log_steps: must be below 2147483648", log_steps=10**20),
    Case(
        "Recipe",
        "`-p caption_prefix` with a zero byte",
        "must not contain '\\x00': only printable characters",
        functools.partial(launched, caption_prefix="a\0"),
    ),
    Case(
        "Recipe",
        "a list as `model`",
        "model: must be one short name; got ['klein']",
        functools.partial(launched, model=["klein"]),
    ),
    asked(
        "Recipe",
        "context_parallel: needs strategy 'ddp' or 'fsdp'; 'zero3' does not read it",
        strategy="zero3",
        num_processes=2,
        context_parallel=2,
    ),
    asked(
        "Recipe",
        "context_parallel: 2 with model 'zimage', whose samples cannot be divided",
        model="zimage",
        strategy="fsdp",
        num_processes=2,
        context_parallel=2,
    ),
    asked(
        "Recipe",
        "context_parallel: 2 does not divide num_processes 3",
        strategy="fsdp",
        num_processes=3,
        micro_batch=1,
        global_batch=1,
        context_parallel=2,
    ),
    asked(
        "Recipe",
        "packing: not with model 'zimage', whose samples cannot stand one behind another; use",
        model="zimage",
        fit="bucket",
        packing=True,
    ),
    asked(
        "Recipe",
        "packing: not with context_parallel 2, which divides the tokens of one size",
        model="klein",
        fit="bucket",
        strategy="fsdp",
        num_processes=2,
        micro_batch=1,
        global_batch=1,
        context_parallel=2,
        packing=True,
    ),
    asked(
        "Recipe",
        "packing: needs objective 'flow'; 'autoencoder' does not read it",
        model="klein",
        objective="autoencoder",
        packing=True,
    ),
    asked(
        "Recipe",
        "cuda_graphs: with compile 'dmd2' would overwrite what a backward pass of another network",
        model="sd15",
        objective="dmd2",
        strategy="single",
        micro_batch=1,
        global_batch=1,
        compile=True,
        cuda_graphs=True,
        gradient_checkpointing="none",
    ),
    asked(
        "Recipe",
        "cuda_graphs: with lora_dropout 0.1 recomputed blocks would drop other numbers",
        model="sd15",
        objective="epsilon",
        strategy="single",
        cuda_graphs=True,
        gradient_checkpointing="full",
        lora_rank=4,
        lora_dropout=0.1,
    ),
    asked("Names of other scripts", "write precision='bf16-mixed'", use_fp16=True),
    asked("Names of other scripts", "write lora_rank=16", use_lora=True),
    asked("Names of other scripts", "write run_root='out' and name='a'", checkpoint_dir="out/a"),
    asked("Names of other scripts", "given twice, as batch_size=4", batch_size=4, micro_batch=2),
    asked("Names of other scripts", "known: 0, 1, 2, 3", zero_stage=5),
    asked(
        "Names of other scripts",
        "needs hybrid_shard or num_shard beside it",
        fsdp_sharding_strategy="HYBRID_SHARD_ZERO2",
    ),
    asked("Names of other scripts", "3 NO_SHARD, 4 HYBRID_SHARD", fsdp_sharding_strategy=3),
    asked(
        "Engines",
        "optimizer: 'flashadamw': with strategy 'zero2' AdamW trains; use 'auto', or strategy",
        strategy="zero2",
        num_processes=2,
        optimizer="flashadamw",
    ),
    asked(
        "Engines",
        "optimizer: 'adamw' with precision 'bf16-master24', which FlashAdamW trains",
        precision="bf16-master24",
        optimizer="adamw",
    ),
    asked(
        "Engines",
        "optimizer: 'adafactor': its update looks at whole matrices, and strategy 'fsdp' cuts them",
        optimizer="adafactor",
        strategy="fsdp",
        num_processes=2,
    ),
    asked(
        "Engines",
        "optimizer: 'schedulefree': it counts its steps, and DeepSpeed steps every flat group",
        optimizer="schedulefree",
        strategy="zero2",
        num_processes=2,
    ),
    asked(
        "Recipe",
        "optimizer: 'prodigy': it finds one rate for all weights; use lr_groups=''",
        optimizer="prodigy",
        lr_groups="{{attn: 0.1}}",
    ),
    asked(
        "Recipe",
        "adam_epsilon: optimizer 'lion' does not read this field",
        optimizer="lion",
        adam_epsilon=1e-6,
    ),
    asked("Recipe", "'attn': rate: Input should be greater than 0", lr_groups="{{attn: 0}}"),
    asked(
        "Recipe", "'attn' has no 'lr'; allowed: rate, weight_decay", lr_groups="{{attn: {{lr: 1}}}}"
    ),
    asked(
        "Recipe",
        "lr_groups: objective 'dmd2' trains several networks; leave it out",
        model="sd15",
        objective="dmd2",
        lr_groups="{{attn: 0.1}}",
    ),
    asked(
        "Recipe",
        "prior_data: needs lora_rank; without it nothing reads this field",
        data="/a:1,/b:1",
        prior_data="/b",
    ),
    asked(
        "Recipe",
        "prior_data: '/c' must be one of several collections in data",
        data="/a:1,/b:1",
        prior_data="/c",
        lora_rank=4,
    ),
    asked(
        "Recipe",
        "prior_weight: needs prior_data; without it nothing reads this field",
        prior_weight=2,
    ),
    asked(
        "Recipe",
        "mask_outside: needs objective",
        model="sd15",
        objective="dmd2",
        mask_outside=0.1,
    ),
    asked(
        "Recipe",
        "sigma_range: needs objective",
        model="sd15",
        objective="epsilon",
        sigma_range="0.5-1",
    ),
    asked("Recipe", "sigma_range: '0.8-0.2' must rise between 0 and 1", sigma_range="0.8-0.2"),
    asked("Recipe", "keep_best: 'heldout' is no number of a validation", keep_best="heldout"),
    asked("Recipe", "held_out: 0 leaves nothing to judge by", keep_best="held_out", held_out=0),
    asked("Recipe", "patience: needs keep_best; without it nothing reads", patience=3),
    asked("Recipe", "ema_warmup: needs ema_decay; without it nothing reads", ema_warmup=True),
    asked("Names of other scripts", "no such file or folder: v.jsonl", val_data_path="v.jsonl"),
    asked("Names of other scripts", "needs objective 'dmd2'", generator_lr=1e-5),
    asked("Recipe", "needs strategy 'ddp'; 'single' does not read it", shard_states=True),
    asked("Recipe", "auto: 'precision' is not chosen by the plan; use strategy", auto="precision"),
    asked("Recipe", "global_batch: 8 is not a multiple of", strategy="auto", num_processes=3),
    asked(
        "Engines",
        "strategy: 'auto' chooses for one machine, not for num_machines=2",
        strategy="auto",
        num_machines=2,
        main_process_ip="host",
    ),
    asked(
        "Engines",
        "strategy: 'auto' chooses for at most 8 GPUs; set CUDA_VISIBLE_DEVICES",
        strategy="auto",
        num_processes=16,
        micro_batch=1,
        global_batch=16,
    ),
    asked(
        "Engines",
        "shard_states: needs updates during backward: GPUs, precision 'bf16-master24'",
        strategy="ddp",
        num_processes=2,
        shard_states=True,
    ),
    asked(
        "Engines",
        "shard_states: one process keeps all states",
        strategy="ddp",
        num_processes=1,
        shard_states=True,
    ),
    asked("Name and folders", "run_root: must name a folder, for example 'runs'", run_root=""),
    asked("Name and folders", "file is a file; give a folder", run_root="{folder}/file"),
    asked("Name and folders", "is a file; give a folder", run_root="{folder}/file/runs"),
    asked("Name and folders", "must be a plain folder name, not a path", name="../x"),
    Case(
        "Name and folders",
        "`-p name` of 100 wide characters",
        "of at most 100 characters and 240 bytes",
        functools.partial(launched, name="図" * 100),
    ),
    asked("Name and folders", "or resume=latest to continue it", name="done"),
    asked("Name and folders", "belongs to another recipe (steps", name="done", steps=7),
    asked("Packages and names", "known for s4://", data="s4://bucket/shards"),
    asked("Packages and names", "warmup_steps: 1000 is more than", steps=10, warmup_steps=1000),
    asked("Files", "data: no such file or folder: /nowhere", data="/nowhere"),
    asked("Files", "data: ~nobody-here/a: ~nobody-here is the home", data="~nobody-here/a"),
    asked("Files", "run_root: ~nobody-here: ~nobody-here is the ho", run_root="~nobody-here"),
    asked("Files", "metadata: no such file or folder: /no.csv", metadata="/no.csv"),
    asked("Files", "start_from: no such file or folder", start_from="/nowhere"),
    asked("Files", "start_from: FOLDER/empty is no usable", start_from="{folder}/empty"),
    asked("Files", "give the folder of a checkpoint", start_from="{folder}/file"),
    asked("Files", "lora_path: no such file or folder", lora_rank=4, lora_path="/no"),
    asked("Files", "prompts: no such", model="sd15", objective="dmd2", prompts="/no.txt"),
    asked("Files", "prompts: no file", model="sd15", objective="dmd2", prompts="/dev/null"),
    asked(
        "Layers and adapters",
        "lr_groups: 'atn' matches no trained parameter (did you mean 'attn'?)",
        lr_groups="{{atn: 0.1}}",
    ),
    asked(
        "Layers and adapters",
        "lr_groups: 'attn.to_q' matches only what patterns before it match",
        lr_groups="{{attn: 0.1, attn.to_q: 0.2}}",
    ),
    asked("Layers and adapters", "lora_targets: no linear layer", lora_rank=4, lora_targets="fc"),
    asked(
        "Layers and adapters",
        "lora_base: 'nf4' found no linear layer with both sides at least 256",
        lora_rank=4,
        lora_base="nf4",
    ),
    asked("Layers and adapters", "lora_path: FOLDER/file", lora_rank=4, lora_path="{folder}/file"),
    adapter(
        "`-p lora_path` of a tensor that is no adapter",
        "to_q.diff, which is no adapter of",
        "transformer.transformer_blocks.0.attn.to_q.diff",
    ),
    adapter(
        "`-p lora_path` of adapters of the text encoder, too, where diffusers loads none",
        "no adapter of the transformer that QwenImagePipeline knows",
        "text_encoder.layers.0.q_proj.lora_A.weight",
    ),
    asked(
        "Layers and adapters",
        "'lokr' do not read it",
        lora_rank=4,
        lora_kind="lokr",
        lora_dropout=0.1,
    ),
    asked(
        "Layers and adapters",
        "'dora', which reads weights",
        lora_rank=4,
        lora_kind="dora",
        lora_base="nf4",
    ),
    asked("Layers and adapters", "no end of a module's name", lora_rank=4, lora_ranks="to_q"),
    asked("Layers and adapters", "no adapted layer is called 'fc'", lora_rank=4, lora_ranks="fc=8"),
    asked("Layers and adapters", "lora_alphas: no adapted", lora_rank=4, lora_alphas="fc=8"),
    asked(
        "Layers and adapters",
        "'kohya' is not known for",
        model="sd3",
        lora_rank=4,
        lora_format="kohya",
    ),
    asked(
        "Layers and adapters", "read only where model_path is a .saf", text_encoder_path="{folder}"
    ),
    asked(
        "Layers and adapters",
        "needs the folder of its text encoder",
        model="klein",
        model_path="a.safetensors",
    ),
    asked(
        "Layers and adapters",
        "'sd3' is not read from one file",
        model="sd3",
        model_path="a.safetensors",
    ),
    adapter("`-p lora_path` of adapters on one layer", "set lora_targets to the layers"),
    asked("Layers and adapters", "trained_layers: qwenimage has no 'fc'", trained_layers="fc"),
    asked("Layers and adapters", "model_path '/no' is not a folder that exists", model_path="/no"),
    asked("Checkpoint", "'latest' with the name of a run", resume="/nowhere"),
    asked("Checkpoint", "no readable info.json", name="damaged", resume="latest"),
    asked("Checkpoint", "tensors has 4 bytes instead of 8", name="cut", resume="latest"),
    asked("Checkpoint", "not finite numbers", name="not-finite", resume="step_000100"),
    asked("Checkpoint", "seed: 0 in the checkpoint, 1 now", name="done", resume="latest", seed=1),
    asked(
        "Checkpoint",
        "To train further give start_from",
        name="done",
        resume="latest",
        lr_schedule="cosine",
        steps=200,
    ),
    Case(
        "Disk",
        "a run_root where this user may not write",
        "run_root: FOLDER/runs/new cannot be written (Permission denied)",
        system_says(errno.EACCES),
    ),
    Case(
        "Disk",
        "a disk without room",
        "cannot be written (No space left on device); give a folder that you may write, with room",
        system_says(errno.ENOSPC),
    ),
    Case(
        "Disk",
        "a disk with less room than one checkpoint needs",
        "a checkpoint needs 101.5 GiB, 63.4 GiB are free on its disk; free some space, or change",
        disk_too_small,
    ),
    Case(
        "Network",
        "`-p main_process_port PORT`, where another program listens",
        "(Address already in use); give another port, or 0 for a free one",
        port_taken,
    ),
    asked("Network", "main_process_port: Input should be less than 65536", main_process_port=99999),
    collection("an empty folder", "nothing in it: expected images with .txt files", {}),
    collection(
        "images without captions",
        "1 images and not one caption (a.png: no a.txt beside it); give each image a .txt of its",
        {"a.png": png()},
    ),
    collection(
        "an empty caption", "(a.png: its caption is empty)", {"a.png": png(), "a.txt": b" "}
    ),
    collection(
        "a list without captions",
        "not one caption (metadata.jsonl:1: none of the keys caption, captions, text",
        listed({"image": "a.png"}),
    ),
    collection(
        "a parquet without captions",
        "(a.parquet row 0: no caption column among image: expected one of caption",
        {"a.parquet": table(image=[png()])},
    ),
    collection(
        "an edit without its source",
        "1 x reference image 1: missing file: b.png (metadata.jsonl:1)",
        listed({"edited_image": "a.png", "source": "b.png", "text": "x"}),
    ),
    collection("half an image", "a.png", {"a.png": png()[:30], "a.txt": b"a square"}),
    collection("a JSON list that is none", "expected a list of objects", {"metadata.json": b"{}"}),
    collection("broken JSON", "not valid JSON", {"metadata.json": b"[{"}),
    collection(
        "a broken line", "1 x bad JSON line: Expecting property name", {"metadata.jsonl": b"{a"}
    ),
    collection("a row without image", "expected one of the keys file_path", listed({"text": "x"})),
    collection(
        "a row outside the folder",
        "path outside the data root: ../a.png",
        listed({"image": "../a.png", "text": "x"}),
    ),
    collection("a row twice", "duplicated id", listed(*[{"image": "a.png", "text": "x"}] * 2)),
    collection("a CSV of other columns", "expected one of file_path", {"metadata.csv": b"a,b\n"}),
    collection(
        "a CSV with two caption columns of one name",
        "2 columns are called 'text'",
        {"metadata.csv": b"file_name,text,text\na.png,x,y\n"},
    ),
    collection(
        "a CSV whose caption holds a comma outside quotes",
        "put a caption with commas in quotes",
        {"metadata.csv": b"file_name,text\na.png,a bar chart, rising\n", "a.png": png()},
    ),
    collection(
        "a CSV with a quote that is not closed",
        "line 2: not a readable CSV file: unexpected end of data",
        {"metadata.csv": b'file_name,text\na.png,"x\nb.png,y\n'},
    ),
    collection("an unknown kind of list", "expected .json, .jsonl, .csv", {"a.xml": b""}, "a.xml"),
    collection("two lists", "name one of them", {"a.csv": b"", "b.jsonl": b""}),
    collection(
        "photos in a format that is not read",
        "1 x format that is not read: .heic: save the picture as PNG or JPEG (a.heic)",
        {"a.heic": b"?", "a.txt": b"a chart"},
    ),
    collection(
        "a caption of 70 MB in a parquet of 5 KB",
        "67 MiB of text in 1 rows: at most 100,000 characters of a row are read",
        {"a.parquet": table(image=[png()], text=["x" * 70_000_000])},
    ),
    shown(
        "`-p mask_outside 0.1` and pictures without masks",
        "mask_outside: 0.1, but no row of data has a mask: a column mask or mask_image",
        listed(dict(file_name="a.png", text="a")),
        mask_outside=0.1,
    ),
    shown(
        "`-p validation_file p.txt` with a reference image, and no `reference_images`",
        "p.txt, line 1: references: 1, and the recipe says reference_images=0",
        listed(dict(file_name="a.png", text="a")) | {"p.txt": b"grid off --ci a.png"},
        validation_file="{folder}/p.txt",
    ),
    shown(
        "`-p validation_file p.txt` whose reference image is not there",
        "b.png: No such file or directory",
        listed(dict(file_name="a.png", text="a")) | {"p.txt": b"grid off --ci b.png"},
        validation_file="{folder}/p.txt",
        model="klein",
        reference_images=1,
    ),
    Case("Data", "`-p data /proc`", "not of data", lambda folder: open_collection("/proc")),
    Case("Data", "a named pipe", "no file but a pipe: FOLDER/pipe.parquet", pipe),
    collection("half a parquet", "must be copied again", {"a.parquet": table(a=[1])[:-20]}),
    collection("a parquet of no images", "no image column", {"a.parquet": table(text=["x"])}),
    collection("half a tar", "copy the shard again", {"a.tar": tar(700)}),
    collection("a tar.gz named .tar", "unpack it with gunzip", {"a.tar": b"\x1f\x8b" + bytes(999)}),
    dataset_folder(
        "a dataset folder without its table",
        "missing file: data-00000-of-00001.arrow",
        "data-00000-of-00001.arrow",
        None,
    ),
    dataset_folder(
        "a dataset folder with half a table",
        "not a readable Hugging Face dataset",
        "data-00000-of-00001.arrow",
        "half",
    ),
    dataset_folder(
        "a dataset folder with a broken state",
        "state.json is not valid JSON",
        "state.json",
        "{",
    ),
    dataset_folder(
        "a dataset folder whose state is a list",
        "state.json holds no object",
        "state.json",
        "[]",
    ),
    dataset_folder(
        "a dataset folder with a broken description",
        "dataset_info.json is not valid JSON",
        "dataset_info.json",
        "{",
    ),
    address("ftp://", "no address that can be read"),
    address("weird://there/a.tar", "Protocol not known: weird"),
    address("file:///nowhere", "no .parquet or .tar shard there"),
    model_folder("a folder without a pipeline", "has no model_index.json", {"x": ""}),
    model_folder("a broken index", "is not valid JSON", {"model_index.json": "{"}),
    model_folder("an index of nothing", "does not name a pipeline", {"model_index.json": "{}"}),
    model_folder("another model", "is a FluxPipeline folder", OTHER),
    model_folder("no component", "is the download complete?", {"model_index.json": KLEIN}),
    model_folder(
        "weights as a pickle",
        "save it again as safetensors",
        {"model_index.json": KLEIN, "transformer/diffusion_pytorch_model.bin": ""},
        weights=True,
    ),
    model_folder(
        "half a weight file",
        "is damaged or cut off",
        {"model_index.json": KLEIN, "transformer/diffusion_pytorch_model.safetensors": "x"},
        weights=True,
    ),
    model_folder(
        "an index that is a list",
        "model_index.json holds a list instead of an object",
        {"model_index.json": "[]"},
    ),
    model_folder(
        "a broken config.json",
        "transformer/config.json is not valid JSON",
        {"model_index.json": KLEIN, "transformer/config.json": "{"},
    ),
    model_folder(
        "a config.json that is a list",
        "transformer/config.json holds a list instead of an object",
        {"model_index.json": KLEIN, "transformer/config.json": "[]"},
    ),
    model_folder(
        "a config.json of another network",
        "describes a UNet2DConditionModel, not a Flux2Transformer2DModel",
        {
            "model_index.json": KLEIN,
            "transformer/config.json": '{"_class_name": "UNet2DConditionModel"}',
        },
    ),
    weights_index("a broken index of the weight files", "is not valid JSON", "{"),
    weights_index("an index that is a number", "holds a number instead of an object", "7"),
    weights_index("an index without weight_map", "has no weight_map of tensor names", "{}"),
    weights_index(
        "an index of numbers", "has no weight_map of tensor names", '{"weight_map": {"a": 1}}'
    ),
    weights_index(
        "an index of a file that is not there",
        "a.safetensors, named in diffusion_pytorch_model.safetensors.index.json, is missing",
        '{"weight_map": {"x": "a.safetensors"}}',
    ),
    weights_index(
        "an index of a file outside the folder",
        "named in diffusion_pytorch_model.safetensors.index.json, is missing",
        '{"weight_map": {"x": "../../a.safetensors"}}',
    ),
    tiny_model(
        "a config.json with text for a number",
        "transformer/config.json: num_layers must be a whole number; it is 'abc'",
        changed("transformer/config.json", num_layers="abc"),
    ),
    tiny_model(
        "a config.json of which no network can be built",
        "config.json of FOLDER/given QwenImageTransformer2DModel cannot be read",
        changed("transformer/config.json", axes_dims_rope=None),
    ),
    tiny_model(
        "a config.json of the VAE with a text for a list",
        "FOLDER/given/vae cannot be read",
        changed("vae/config.json", dim_mult=None),
    ),
    tiny_model(
        "a config.json of the text encoder with a text for a number",
        "FOLDER/given/text_encoder cannot be read",
        changed("text_encoder/config.json", text_config="abc"),
    ),
    tiny_model(
        "weights in int8",
        "FOLDER/given/transformer holds int8 in",
        stored_otherwise("transformer/diffusion_pytorch_model.safetensors", in_bytes),
    ),
    tiny_model(
        "a text encoder in int8",
        "FOLDER/given/text_encoder holds int8 in",
        stored_otherwise("text_encoder/model.safetensors", in_bytes),
    ),
    tiny_model(
        "a text encoder that lacks a tensor",
        "FOLDER/given/text_encoder lacks",
        stored_otherwise("text_encoder/model.safetensors", renamed),
    ),
    tiny_model(
        "a VAE that lacks a tensor",
        "FOLDER/given/vae",
        stored_otherwise("vae/diffusion_pytorch_model.safetensors", renamed),
    ),
    tiny_model(
        "no scheduler_config.json",
        "FOLDER/given/scheduler/scheduler_config.json is missing",
        lambda folder: (folder / "scheduler/scheduler_config.json").unlink(),
    ),
    tiny_model(
        "a broken scheduler_config.json",
        "scheduler/scheduler_config.json is not valid JSON",
        lambda folder: (folder / "scheduler/scheduler_config.json").write_text("{"),
    ),
    tiny_model(
        "a scheduler_config.json with text for a number",
        "model_path: scheduler_config.json of FOLDER/given gives no noise levels",
        changed("scheduler/scheduler_config.json", base_shift="abc"),
    ),
    tiny_model(
        "a scheduler_config.json that names no scheduler",
        "scheduler_config.json names 'Nothing', which is no scheduler of diffusers",
        changed("scheduler/scheduler_config.json", _class_name="Nothing"),
    ),
    lent_model(
        "klein without tokenizer_config.json",
        "tokenizer/tokenizer_config.json is missing",
        "klein",
        removed("tokenizer/tokenizer_config.json"),
    ),
    lent_model(
        "klein with half a chat template",
        "(chat_template.jinja, or in tokenizer_config.json) cannot be used",
        "klein",
        cut("tokenizer/chat_template.jinja"),
    ),
    lent_model(
        "sd15 without its vocabulary",
        "FOLDER/given/tokenizer has no vocabulary (tokenizer.json, or vocab.json with merges.txt)",
        "sd15",
        removed("tokenizer/tokenizer.json"),
    ),
    lent_model(
        "flux1 with half a tokenizer.json",
        "FOLDER/given/tokenizer_2/tokenizer.json is not valid JSON",
        "flux1",
        cut("tokenizer_2/tokenizer.json"),
    ),
    lent_model(
        "sdxl with half a text encoder",
        "FOLDER/given/text_encoder_2/model.safetensors is damaged or cut off",
        "sdxl",
        cut("text_encoder_2/model.safetensors"),
    ),
    *(
        lent_model(title, says, model, removed(file))
        for table in added("PARTS_MISSING")
        for title, says, model, file in table
    ),
    command("zero_to_bf16", "nowhere is no folder; give one like", "/nowhere", "out"),
    command("zero_to_bf16", "is a run; give one of its checkpoints", "{folder}/runs/done", "out"),
    command(
        "zero_to_bf16",
        "no readable info.json",
        "{folder}/runs/damaged/checkpoints/step_000100",
        "out",
    ),
    command(
        "zero_to_bf16",
        "names no recipe",
        "{folder}/runs/unnamed/checkpoints/step_000100",
        "out",
    ),
    command("merge_lora", "is not a folder that exists", "/nowhere", "/lora", "out"),
    command("merge_lora", "out: FOLDER/file exists; give a new", "/base", "/lora", "{folder}/file"),
    command("merge_lora", "FOLDER/file is no folder", "/base", "/lora", "{folder}/file/merged"),
    used(
        "sample -p source FOLDER/file",
        "source: FOLDER/file is no folder; give a run, a checkpoint, a model folder",
        lambda folder: sample.find_weights(folder / "file"),
    ),
    used(
        "sample -p source FOLDER/empty",
        "source: FOLDER/empty has no model_index.json",
        lambda folder: sample.find_weights(folder / "empty"),
    ),
    used(
        "sample -p source FOLDER/runs/done -p base klein",
        "base: does nothing with FOLDER/runs/done, which is no adapter",
        lambda folder: sample.find_weights(folder / "runs/done", base="klein"),
    ),
    used(
        "sample -p source FOLDER/runs/done -p state mean",
        "state: 'mean': expected one of weight, ema, base",
        lambda folder: sample.find_weights(folder / "runs/done", "mean"),
    ),
    used(
        "sample -p seeds 1;2",
        "seeds: expected numbers with commas between them; got '1;2'",
        lambda folder: sample.listed_numbers("seeds", "1;2"),
    ),
    used(
        "sample -p batch 0",
        "batch: expected a number from 1; got 0",
        lambda folder: sample.sample_batches([sample.Request("a bar chart")], 0),
    ),
    used("sample -p out FOLDER", "samples.json holds no list of pictures; name anot", odd_samples),
    used(
        "sample -p out FOLDER/link", "cannot be made: it is a broken link; name anot", broken_link
    ),
    used(
        "sample -p out FOLDER/file",
        "out: FOLDER/file cannot be made: it is a file; name another folder",
        lambda folder: user_folder(folder / "file"),
    ),
    used(
        "evaluate -p data FOLDER/empty",
        "data: FOLDER/empty is neither a run nor a checkpoint",
        lambda folder: evaluate.trained_recipe(folder / "empty"),
    ),
    used(
        "evaluate -p count 0",
        "count: expected a number from 1; got 0",
        lambda folder: evaluate.run_targets(resolve(), 0),
    ),
    used(
        "compare -p runs FOLDER/empty",
        "runs: FOLDER/empty is no run folder, and none is in it (recipe.yaml)",
        lambda folder: compare.found_runs(str(folder / "empty")),
    ),
    *(used(words, says, call) for table in added("REFUSED_BY") for words, says, call in table),
    *(asked(topic, says, **given) for table in added("REFUSED") for topic, says, given in table),
]


def sentence(case: Case, folder: Path) -> str:
    """What the user sees, with FOLDER for the scene. AssertionError where nothing is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.give(folder)
        except AssertionError:
            raise
        except case.kinds as error:
            return str(error).replace(str(folder), "FOLDER")
    raise AssertionError(f"{case.wrong} was not refused")


def page(folder: Path) -> str:
    """docs/generated/refusals.md."""
    lines = [
        "# What is refused, and what it says",
        "",
        "Every row was tried; the right column is what a user reads. The same table is tried by",
        "`tests/test_refusals.py`. Regenerate with `python tests/tools/refusals.py`.",
    ]
    for topic in dict.fromkeys(case.topic for case in CASES):
        lines += ["", f"## {topic}", "", "| given | said |", "|---|---|"]
        for case in CASES:
            if case.topic == topic:
                said = "<br>".join(sentence(case, folder).split("\n")).replace("|", "\\|")
                lines.append(f"| {case.wrong} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    with scene() as folder:
        text = page(folder)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
