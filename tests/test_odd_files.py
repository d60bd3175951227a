"""Whatever stands in the small files of a model or run folder: a sentence that names the file.

Every key of every JSON gets values of other types, sizes and shapes, drawn at random; whole files
become lists, deep nests and bytes that are no text.
"""

import ast
import contextlib
import gc
import json
import os
import random
import sys
import warnings
from pathlib import Path

import pytest
from additions import added

import sciftune
from sciftune.core.checkpoint_folders import check_same_run, checkpoint_fault, checkpoint_info
from sciftune.core.digests import sealed
from sciftune.core.files import FileError
from sciftune.core.plan import Plan
from sciftune.core.presets import read_presets
from sciftune.core.recipe import Recipe, RecipeError, resolve
from sciftune.core.rundir import RunDir
from sciftune.data.captions import jsonl_captions, text_captions
from sciftune.data.images import DataError
from sciftune.data.readers import csv_rows, json_rows
from sciftune.data.sources import remote_source
from sciftune.lab.jobs import LaunchFile, read_status, state
from sciftune.lab.scores import read_evaluation, read_pictures
from sciftune.lab.summary import environment_rows
from sciftune.models.family import get_family

PACKAGE = Path(sciftune.__file__).parent

VALUES = [None, True, -1, 10**7, 10**30, 1.5, float("nan"), "abc", "", [], ["x"], {}, dict(a=1)]
VALUES += [["transformers", "Trainer"], ["transformers"], ["os", "system"], [[1]] * 20_000]
DEEP = b"[" * 5000 + b"]" * 5000
WHOLE = [DEEP, b"\xff\xfe{}", b"[]", b"7", b"null", b"", b"{", b'{"a": NaN', b"9" * 5000]
TRIES = 60  # of a folder


def changes(content, draws):
    """The file as others might write it."""
    value = json.loads(content)
    if draws.random() < 0.2 or not value or not isinstance(value, dict):
        return draws.choice(WHOLE)
    key = draws.choice(sorted(value))
    return json.dumps(value | {key: draws.choice(VALUES)}).encode()


def is_sentence(said, *names):
    """Whether one line names the file, its folder at least."""
    return any(str(name) in said for name in names) and "\n" not in said and len(said) < 900


@pytest.mark.parametrize("name", ["klein", "sdxl", "qwenimage", *sum(added("MODEL_FOLDERS"), [])])
def test_a_model_folder(name, tmp_path):
    family, draws = get_family(name), random.Random(name)
    folder = family.tiny(tmp_path / "model")
    files = [f for f in sorted(folder.rglob("*.json")) if f.stat().st_size < 20_000]
    refused = 0
    for _ in range(TRIES):
        file = draws.choice(files)
        good = file.read_bytes()
        odd = changes(good, draws)
        file.unlink()  # a stand-in may be linked
        file.write_bytes(odd)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                family.check_files(folder)
                family.check_schedule(folder)
                family.empty_denoiser(folder)
        except ValueError as error:
            refused += 1
            assert is_sentence(str(error), file.name, file.parent), (file, odd[:80], str(error))
        file.write_bytes(good)
    assert refused > TRIES / 5


@pytest.fixture
def run(tmp_path):
    """A run folder with its small files."""
    run = RunDir(tmp_path / "run")
    step = run.checkpoints / "step_000001"
    step.mkdir(parents=True)
    recipe = resolve(cpu=True)
    recipe.save(run.recipe)
    Plan().save(run.plan)
    run.status.write_text(json.dumps(dict(pid=1, host="far", started=1, log_offset=0)))
    run.record.write_text(json.dumps(dict(packages={}, gpus=[])))
    launch = dict(command=["a"], environment=dict(A="1"), processes=1)
    (run.path / "launch.json").write_text(json.dumps(launch))
    info = dict(step=1, recipe=recipe.model_dump(mode="json"), data="abc", files={}, world_size=1)
    (step / "info.json").write_text(sealed(info))
    return run


def read_all(run):
    """What reads the small files of a run."""
    Recipe.load(run.recipe)
    Plan.load(run.plan)
    LaunchFile.load(run)
    read_status(run)
    state(run)
    environment_rows(run)
    step = run.checkpoints / "step_000001"
    if fault := checkpoint_fault(step):
        raise FileError(fault)
    check_same_run(checkpoint_info(step), resolve(cpu=True))


def test_a_run_folder(run):
    draws = random.Random(0)
    read_all(run)
    for file in (run.plan, run.status, run.record, run.path / "launch.json"):
        good = file.read_bytes()
        for _ in range(TRIES):
            odd = changes(good, draws)
            file.write_bytes(odd)
            try:
                read_all(run)
            except ValueError as error:
                assert is_sentence(str(error), file.name), (file, odd[:80], str(error))
        file.write_bytes(good)


def test_a_checkpoint_with_a_seal_of_its_own(run):
    draws, file = random.Random(0), run.checkpoints / "step_000001" / "info.json"
    good = json.dumps(checkpoint_info(file.parent)).encode()
    for _ in range(TRIES):
        odd = changes(good, draws)
        with contextlib.suppress(ValueError, RecursionError):
            odd = sealed(json.loads(odd)).encode()
        file.write_bytes(odd)
        try:
            read_all(run)
        except ValueError as error:
            assert is_sentence(str(error).partition("\n")[0], file.name, "resume"), (odd, error)


@pytest.mark.parametrize("odd", [*WHOLE, b"a: &a [*a]", b"1: 2", b"steps: 2020-13-45"])
def test_a_recipe(run, odd):
    run.recipe.write_bytes(odd)
    with pytest.raises(RecipeError) as error:
        Recipe.load(run.recipe)
    assert is_sentence(str(error.value), run.recipe.name)


# Who reads

READS = {  # Calls that read a file or parse what others may have written
    *("json.load", "json.loads", "yaml.load", "yaml.safe_load", "csv.reader", "csv.DictReader"),
    *("tomllib.load", "tomllib.loads", "torch.load", "np.load", "pickle.load", "pickle.loads"),
}
PROJECT = (  # Modules that read the files of this repository
    *("baseline", "bench", "bench_table", "contents", "gpu_profile", "gpu_suite", "ranks"),
    *("pages", "site", "tables", "wheelhouse"),
)
ALONE = {  # Functions that read for themselves, by why
    "this process, or one that it has started, has just written it": """
        core/secrets core/waiting.receive_orders core/waiting._repeat data/cache.save_shard
        data/rows._facts data/sources.joined_quarantine lab/command.shown_tables
        lab/command.Execution.failure lab/command.Execution.keep
        lab/command.Execution.run lab/evaluate._in_processes lab/evaluate.evaluate
        lab/evaluate.job_of lab/evaluate.part_command lab/prepare._write_run lab/jobs.launch
        lab/jobs.last_lines lab/jobs.start lab/jobs.follow lab/jobs.job_log
        models/chat_templates.TemplateProcess._asked models/chat_templates._answer
        training/heartbeat.Heartbeat.__init__
        core/writing.written_aside""",
    "no file, but what a library has made": """
        models/published._configuration models/family.count_flops models/tiny.qwen_bpe""",
    "lists of packages, which importlib.metadata reads": """
        core/compat.packages_distributions""",
    "a file of the system": """
        models/chat_templates._memory_now training/heartbeat._runs
        training/host_memory._sum_of_lines""",
    "source code of a plug-in or a packaged notebook, which runs anyway": """
        core/registry._assigned core/registry._record_texts lab/command._makes_recipe""",
    "hashed in pieces, whatever it holds": """
        core/digests.pieces_of
        data/encode.encoder_fingerprint
        data/cache.header_digest""",
    "a picture: with bounds of its own": """
        data/images.file_bytes lab/evaluate.Target.told""",
    "tensors, after the digests of their file": """
        training/checkpoints.CheckpointTensors.__getitem__""",
}


def reads_itself(call):
    """Whether a call reads a file, or JSON, YAML and the like, without `core.files`."""
    name = ast.unparse(call.func)
    if name == "open":
        modes = [ast.literal_eval(mode) for mode in call.args[1:2]]
        return not modes or "r" in modes[0]
    return name in READS or name.rpartition(".")[2] in ("read_text", "read_bytes") and "." in name


def readers_of(node, place):
    """Places, as folder/module.Class.function, of calls that read by themselves."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and reads_itself(child):
            yield place
        named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        yield from readers_of(child, f"{place}.{child.name}" if named else place)


def test_others_files_are_read_by_one_reader():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if path.stem not in PROJECT and module != "core/files":
            found |= set(readers_of(ast.parse(path.read_text()), module))
    alone = {place for places in (*ALONE.values(), *added("ALONE")) for place in places.split()}
    assert not found - alone, "read it by sciftune.core.files, or say in ALONE why not"
    assert not alone - found, "these no longer read by themselves: remove them from ALONE"


ODD_TEXT = [DEEP, b"\xff\xfe", b'{"a"', b"[]", b"7", b"null", b"", b'"a', b"a,b\n\xff", b"9" * 5000]
ODD_TEXT += [b"\xef\xbb\xbf{", b"{}\n{}", b"x" * 200_000, None]  # None: a pipe


@pytest.mark.parametrize("odd", ODD_TEXT)
def test_small_files_of_all_kinds(odd, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    readers = {
        "evaluation.jsonl": lambda file: read_evaluation(file.parent),
        "pictures.jsonl": lambda file: read_pictures(file.parent),
        "metrics.jsonl": lambda file: RunDir(file.parent).read_metrics(),
        "captions.txt": text_captions,
        "captions.jsonl": jsonl_captions,
        "list.json": lambda file: json_rows(tmp_path, file),
        "list.jsonl": lambda file: json_rows(tmp_path, file),
        "list.csv": lambda file: csv_rows(tmp_path, file),
        "a.yaml": lambda file: read_presets(file.parent),
    }
    for table in added("TEXT_FILES"):
        readers |= table
    for name, read in readers.items():
        place = folder / name.replace(".", "-")
        place.mkdir()
        file = place / name
        os.mkfifo(file) if odd is None else file.write_bytes(odd)
        try:
            read(file)
        except ValueError as error:
            assert is_sentence(str(error), file.name), (name, odd and odd[:80], str(error))


@pytest.mark.parametrize("address", ["ftp://", "ftp://localhost:1/a.tar", "sftp://", "weird://a"])
def test_an_address_that_nobody_answers(address, monkeypatch):
    left = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)
    with pytest.raises(DataError) as error:
        remote_source(address)
    gc.collect()
    assert is_sentence(str(error.value), address) and not left
