"""Values without sense, addresses where folders are meant, and misspelt parameters are refused."""

import itertools
import random

import pytest

from sciftune.core.fields import ADDRESSED, PROSE
from sciftune.core.recipe import RecipeError, foreign_meanings, resolve
from sciftune.core.recipe_fields import Fields
from sciftune.core.registry import records
from sciftune.lab.command import call_command
from sciftune.lab.jobs import LaunchError
from sciftune.lab.prepare import recipe_from, with_absolute_paths

NUMBERS = [n for n, f in Fields.model_fields.items() if f.annotation in (int, float)]
TEXTS = [n for n, f in Fields.model_fields.items() if f.annotation is str]
ADDRESSES = ("s3://bucket/runs", "gs://b", "file:///tmp/x", "https://host/a", "s3:/bucket")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_without_sense(name):
    for value in (1e308, 1e30, 10**30, float("nan"), float("inf"), -float("inf"), -(10**30)):
        with pytest.raises(RecipeError, match=name):
            resolve(**{name: value})


@pytest.mark.parametrize("name", TEXTS)
def test_separators_of_nothing(name):
    for value in (",,,", "|", " , ,"):
        with pytest.raises(RecipeError, match=name):
            resolve(**{name: value})


@pytest.mark.parametrize("name", [n for n in TEXTS if n not in (*ADDRESSED, *PROSE)])
def test_an_address_where_a_folder_is_meant(name):
    for value in ADDRESSES:
        with pytest.raises(RecipeError, match=name):
            resolve(**{name: value})


@pytest.mark.parametrize("name", TEXTS)
def test_the_home_folder_of_nobody(name):
    """A field either refuses it by name, or does not hold a path."""
    value = "~nobody-here/a"
    try:
        recipe = with_absolute_paths(recipe_from({name: value}))
    except LaunchError as error:
        assert str(error).startswith(f"{name}: ") and "\n" not in str(error)
    else:
        assert getattr(recipe, name) == value


@pytest.mark.parametrize(
    "words,says",
    [
        ("sample sourc=x", "unknown parameter 'sourc' (did you mean 'source'?)"),
        ("evaluate -p cuont 3", "unknown parameter 'cuont' (did you mean 'count'?)"),
        ("compare run=x", "unknown parameter 'run' (did you mean 'runs'?)"),
        ("run -f missing.yaml", "missing.yaml is missing"),
        ("look -f odd.yaml", "odd.yaml is not valid YAML: nested too deeply"),
        ("plan -f odd.yaml", "odd.yaml is not valid YAML: nested too deeply"),
        ("plan model=['klein']", "model: must be one short name; got ['klein']"),
        ("plan preset={a:1}", "preset: must be one short name"),
    ],
)
def test_a_command(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.yaml").write_text("[" * 5000)
    assert call_command(words.split()) in (1, 2)
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and len(said.splitlines()) <= 2, said


ODD = [["klein"], dict(a=1), [["x"]], 10**30, float("inf"), float("nan"), True, "\0", "x" * 5000]


@pytest.mark.parametrize("name", sorted({*Fields.model_fields, *foreign_meanings()}))
def test_a_value_of_another_type(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in ODD:
        try:
            recipe_from({name: value})
        except LaunchError as error:
            assert str(error)


TOGETHER = dict(  # fields that weigh samples, cells, parts and noise levels, and those beside them
    lr_groups="{attn: {rate: 0.5, until_step: 9}}",
    sigma_range="0.5-1, 2:0-1",
    timestep_density="logit_normal",
    timestep_shift="pipeline",
    mask_outside=0.1,
    text_weight=4.0,
    prior_data="/b",
    prior_weight=2.0,
    keep_best="held_out",
    patience=2,
    ema_decay=0.9,
    ema_warmup=True,
    optimizer="schedulefree",
    lora_kind="lokr",
    lora_rslora=True,
    lora_ranks="to_q=2",
    lora_alphas="to_q=2",
    lora_dropout=0.1,
    lora_factor=2,
    lora_format="comfyui",
    lora_base="nf4",
    trained_layers="norm_out",
    tag_orders=4,
    tags_kept=2,
    trigger="sks",
    prompt="a chart",
    folder_repeats=True,
    caption_words=0.5,
    packing=True,
    reference_images=1,
    offload="params",
    cuda_graphs=True,
    context_parallel=2,
    num_train_epochs=2,
)


def test_every_two_fields_resolve_or_the_one_at_fault_is_named(tmp_path, monkeypatch):
    """Each pair with a drawn objective and kind of adapters; without what is named it resolves."""
    monkeypatch.chdir(tmp_path)
    default, draws = Fields(), random.Random(0)
    models = ("klein", "qwenimage", "sd15", "sd3", "bagel")
    objectives, kinds = list(records("objectives").values()), ["", *records("adapters")]
    for names in itertools.combinations(TOGETHER, 2):
        objective = draws.choice(objectives)
        able = [name for name in models if objective.trains(records("models")[name])]
        given = dict(objective=objective.name, model=draws.choice(able), preset="tiny", data="/a")
        given |= dict(data="/a:1,/b:1") if "prior_data" in names else {}
        given |= {name: TOGETHER[name] for name in names}
        if kind := draws.choice(kinds):
            given = dict(lora_rank=4, lora_kind=kind) | given
        said = []
        while True:
            try:
                recipe = recipe_from(given)
                break
            except LaunchError as error:
                lines = str(error).splitlines()
                said += lines
                for line in lines:
                    assert len(line) < 400 and line.partition(":")[0] in given, (given, said)
                    del given[line.partition(":")[0]]
        left = given.keys() & names
        assert not [name for name in left if getattr(recipe, name) == getattr(default, name)], said
