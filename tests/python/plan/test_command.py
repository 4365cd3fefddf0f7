"""libddp plan from the command line."""

import json

import pytest
from libddp.__main__ import main

SMALL = ["plan", "--gpt", "2x64", "--vocabulary", "100", "--batch", "2", "--length", "16"]

MODEL = '''
"""A model of somebody."""
from dataclasses import dataclass

from torch import nn


@dataclass
class Config:
    width: int
    depth: int = 2


class Net(nn.Sequential):
    def __init__(self, config: Config):
        super().__init__(*(nn.Linear(config.width, config.width) for _ in range(config.depth)))


def build(width=4, depth=1):
    return Net(Config(width, depth))


def broken():
    raise FileNotFoundError("no weights here")


def seven():
    return 7


size = 3
'''


@pytest.fixture
def model(tmp_path):
    path = tmp_path / f"plan_model_{abs(hash(tmp_path)) % 10**9}.py"
    path.write_text(MODEL)
    return str(path)


def planned(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_of_all_settings(capsys):
    assert main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 blocks; 2 ranks, 2 per host; batch 2 x 16 per rank; adamw" in lines[0]
    assert "CPUOffload" in lines[2]
    names = [line.split("  ")[0] for line in lines[5:]]
    assert names[:3] == ["DDP", "DDP + checkpointing", "ZeRO-1"]
    assert len(names) == 12


def test_json_has_bytes(capsys):
    result = planned(capsys, *SMALL, "--ranks", "4", "--ranks-per-host", "2")
    ddp = result["settings"][0]
    assert ddp["parameters"] == result["parameter_bytes"] == 4 * result["parameters"]
    assert ddp["step_per_host"] == 2 * ddp["per_rank"]
    assert result["units"] == 3


@pytest.mark.parametrize("options", [["--optimizer", "sgd"], ["--param-dtype", "bf16"]])
def test_zero_1_is_planned_where_it_exists(capsys, options):
    result = planned(capsys, *SMALL, *options)
    assert [s["setting"] for s in result["settings"]][:3] == ["DDP", "DDP", "NO_SHARD"]


def test_a_limit_says_what_fits(capsys):
    assert main([*SMALL, "--limit", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "smallest that fits 1.00 GiB: " in out
    result = planned(capsys, *SMALL, "--limit", "1GiB", "--process", "1MiB")
    assert result["limit"] == 1 << 30
    assert len(result["fitting"]) == 12


def test_nothing_fits_is_a_status_of_its_own(capsys):
    assert main([*SMALL, "--limit", "1MiB"]) == 3
    assert "does not fit 1.00 MiB: the smallest, " in capsys.readouterr().out


def test_a_model_of_a_file(capsys, model):
    by_name = ["plan", "--batch", "2", "--inputs", "float32:8"]
    fields = '{"width": 8, "depth": 3}'
    for factory in ("Net", "build"):
        arguments = [*by_name, "--model", f"{model}:{factory}", "--model-args", fields]
        result = planned(capsys, *arguments)
        assert result["parameters"] == 3 * (64 + 8)
        assert result["units"] == 4
    positions = planned(capsys, *by_name, "--model", f"{model}:build", "--model-args", "[8, 2]")
    assert positions["parameters"] == 2 * (64 + 8)


def test_a_model_of_a_module(capsys):
    arguments = ["plan", "--model", "torch.nn:Linear", "--model-args", "[8, 8]"]
    result = planned(capsys, *arguments, "--inputs", "float32:8")
    assert result["parameters"] == 72
    assert len(result["settings"]) == 6


def refused(capsys, *arguments):
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("libddp plan: ")
    assert "Hint: " in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which model?"),
        (["--gpt", "2x64", "--model", "a:b"], "which model?"),
        (["--gpt", "huge"], "--gpt 'huge' is no size of a GPT"),
        (["--gpt", "0x64"], "--gpt '0x64' is no size of a GPT"),
        (["--gpt", "2x64", "--batch", "0"], "a batch of 0 x 1024 is nothing"),
        (["--gpt", "2x64", "--limit", "lots"], "'lots' is no amount of memory"),
        (["--gpt", "2x64", "--ranks", "3", "--ranks-per-host", "2"], "HYBRID_SHARD"),
        (["--gpt", "2x64", "--ranks", "0"], "0 ranks"),
        (["--gpt", "2x64", "--block", "Blok"], "--block Blok: the model has no module"),
        (["--gpt", "2x64", "--optimizer", "x"], "--optimizer 'x' is unknown"),
        (["--gpt", "2x64", "--optimizer-args", "lr=1"], "--optimizer-args is no JSON"),
        (["--gpt", "2x64", "--optimizer-args", "[1]"], "--optimizer-args is a list"),
        (["--model", "torch.nn"], "--model 'torch.nn' names no factory"),
        (["--model", "torch.nn:Lineal"], "has nothing to call under the name 'Lineal'"),
        (["--model", "no_such_module_here:f"], "cannot import 'no_such_module_here'"),
        (["--model", "nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["--model", "torch.nn:Linear"], "Linear raised TypeError"),
        (["--model", "torch.nn:Linear", "--model-args", "[8, 8]"], "the model does not run"),
        (["--gpt", "2x64", "--inputs", "float99:3"], "--inputs 'float99:3' is no input"),
    ],
)
def test_wrong_input(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("broken", "broken raised FileNotFoundError: no weights here"),
        ("seven", "seven returned a int, not a torch.nn.Module"),
        ("size", "has nothing to call under the name 'size'. Hint: it has Config, Net, "),
        ("Net", "Net raised TypeError"),
    ],
)
def test_factories_that_make_no_model(capsys, model, factory, words):
    assert words in refused(capsys, "--model", f"{model}:{factory}")


def test_an_unknown_dtype_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--dtype", "int3"])
    assert "'int3' is none of" in capsys.readouterr().err
