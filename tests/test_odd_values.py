"""Values without sense, addresses where folders are meant, and misspelt parameters are refused."""

import pytest

from sciftune.core.fields import ADDRESSED, PROSE
from sciftune.core.recipe import RecipeError, foreign_meanings, resolve
from sciftune.core.recipe_fields import Fields
from sciftune.lab.command import call_command
from sciftune.lab.jobs import LaunchError
from sciftune.lab.prepare import recipe_from

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
