"""config.py and the keys of train.py: types, the JSON file, one clear line for each mistake."""

import dataclasses
import json
import re
from pathlib import Path

import config
import pytest
from config import HelpWanted, UserError, parse

pytest.importorskip("libddp.distributed", reason="libddp is not installed")
from sample import SampleSettings
from train import TrainSettings, check

DOCS = Path(__file__).parents[3] / "docs" / "nanogpt.md"


def test_values_take_the_type_of_the_default():
    got = parse(
        TrainSettings, ["--n_layer=2", "--learning_rate=3e-4", "--compile=true", "--data=a=b.txt"]
    )
    assert (got.n_layer, got.learning_rate, got.compile, got.data) == (2, 3e-4, True, "a=b.txt")
    assert parse(TrainSettings, ["--compile=False"]).compile is False
    assert parse(TrainSettings, []) == TrainSettings()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--n_layers=3", r"there is no key 'n_layers'; did you mean n_layer"),
        ("--qqqq=3", r"there is no key 'qqqq'; --help lists the keys"),
        ("--n_layer=three", r"--n_layer=three: expected a whole number"),
        ("--n_layer=2.5", r"--n_layer=2.5: expected a whole number"),
        ("--dropout=much", r"--dropout=much: expected a number"),
        ("--compile=yes", r"--compile=yes: expected True or False"),
        ("--n_layer", r"cannot read '--n_layer': settings are written --key=value"),
        ("n_layer=3", r"cannot read 'n_layer=3': settings are written --key=value"),
        ("--config=/nowhere/x.json", r"--config=/nowhere/x.json: No such file or directory"),
    ],
)
def test_mistakes_are_named(argument, message):
    with pytest.raises(UserError, match=message):
        parse(TrainSettings, [argument])


def test_config_file_and_precedence(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"n_layer": 2, "dropout": 0.5, "bias": True, "data": "x.txt"}))
    got = parse(TrainSettings, [f"--config={path}", "--n_layer=3"])
    assert (got.n_layer, got.dropout, got.bias, got.data) == (3, 0.5, True, "x.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"n_lear": 1}', "there is no key 'n_lear'; did you mean n_layer"),
        ('{"n_layer": 4.5}', "--n_layer=4.5: expected a whole number"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UserError, match=re.escape(message)):
        parse(TrainSettings, [f"--config={path}"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_from": "gpt2"}, "--init_from=gpt2: expected one of auto, scratch, resume"),
        ({"dtype": "int8"}, "--dtype=int8: expected one of auto, float32, bfloat16, float16"),
        ({"batch_size": 0}, "--batch_size=0: expected at least 1"),
        ({"dropout": 1.0}, "--dropout=1.0: expected 0 <= dropout < 1"),
        ({"n_embd": 30}, "--n_embd=30 does not divide into --n_head=4 heads"),
    ],
)
def test_values_that_cannot_work_are_refused(change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(TrainSettings(**change))


def test_a_missing_package_is_named_before_training(monkeypatch):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--plot=True needs matplotlib: pip install"):
        check(TrainSettings(plot=True))
    check(TrainSettings())


def test_help_lists_every_key():
    with pytest.raises(HelpWanted) as caught:
        parse(TrainSettings, ["--help"])
    for field in dataclasses.fields(TrainSettings):
        assert f"--{field.name}=" in str(caught.value)


def test_only_the_first_rank_of_a_host_speaks(monkeypatch, capsys):
    def fail(_):
        raise UserError("the text is bad")

    monkeypatch.setattr(config.time, "sleep", lambda seconds: None)
    for local_rank, expected in (("0", "train.py: error: the text is bad\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert config.run_script(fail, "train.py") == 1
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize("kind", [TrainSettings, SampleSettings])
def test_the_documentation_has_every_key_with_its_default(kind):
    text = DOCS.read_text(encoding="utf-8")
    for field in dataclasses.fields(kind):
        default = str(field.default).encode("unicode_escape").decode()
        shown = f"`{default}`" if default else "(empty)"
        assert f"| `{field.name}` | {shown} | {field.metadata['doc']} |" in text
