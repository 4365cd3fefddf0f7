"""limits.py: every step trains the same network; what fails is a row; table, file and picture."""

import json
import re

import pytest
from example_modules import load
from launches import finish, launch

limits = load("ddp_limits")
UserError = limits.borrowed.UserError
TINY = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--vocab_size=64",
    "--block_size=16",
    "--batch_size=4",
    "--micro_steps=2",
    "--segments=2",
    "--iterations=2",
    "--device=cpu",
]
ROW = {"added_mib": 12.3, "peak_mib": 600.0, "ms": 7.1, "first_loss": 4.2, "last_loss": 4.1}


@pytest.mark.parametrize("engine", ["torch"])
def test_every_step_trains_the_same_network(capsys, engine):
    rows = {}
    for name in limits.steps.NAMES[:-1]:
        assert limits.measure.main([*TINY, f"--engine={engine}", f"--steps={name}"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        rows[name] = json.loads(line.removeprefix(limits.measure.MARK))
    first, last = rows["baseline"]["first_loss"], rows["baseline"]["last_loss"]
    assert last < first
    for name, row in rows.items():
        tolerance = 1e-5 if name == "accumulate" else 1e-2  # the others compute in bf16
        assert row["first_loss"] == pytest.approx(first, rel=tolerance), name
        assert row["last_loss"] == pytest.approx(last, rel=tolerance), name
        assert row["ms"] > 0
        assert row["peak_mib"] >= row["added_mib"] >= 0


def test_table_file_and_picture(tmp_path, capsys, monkeypatch):
    def run(settings, step):
        if step.offload:
            return {"step": step.name, "failed": "no room"}
        return {"step": step.name, **ROW}

    monkeypatch.setattr(limits.limits, "run", run)
    assert limits.limits.main([f"--out_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(limits.steps.STEPS)
    assert lines[2].split() == ["DDP", "12", "MiB", "600", "MiB", "7", "ms", "4.1000"]
    assert re.fullmatch(r"\+ CPU offload +failed: no room", lines[-1])
    kept = json.loads((tmp_path / "limits.json").read_text())
    assert [row["step"] for row in kept["rows"]] == list(limits.steps.NAMES)
    assert (tmp_path / "limits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("noise\nmeasure.py: error: no such device\nmore", "no such device"),
        ("a\nx.ChildFailedError: \n[rank0]: RuntimeError: why\nz", "RuntimeError: why"),
        (
            "RuntimeError: [] DefaultCPUAllocator: can't allocate memory: 5 bytes\nPeerError: x",
            "DefaultCPUAllocator: can't allocate memory: 5 bytes",
        ),
        ("bye\n", "bye"),
        ("", "exit status -9"),
    ],
)
def test_the_reason_of_a_failure(output, wanted):
    assert limits.limits.reason(output, -9) == wanted


def test_a_rank_that_may_take_no_more_memory_says_so(tmp_path):
    """In a process of its own: a limit stays."""
    arguments = [*TINY, "--steps=baseline", "--n_embd=512", "--limit_mib=10"]
    command = [limits.measure.__file__, *arguments]
    ((status, output),) = finish(launch(command, tmp_path), deadline=120)
    assert status == 1
    assert "DefaultCPUAllocator: can't allocate memory" in output


def test_under_the_launcher(tmp_path):
    arguments = [*TINY, "--steps=baseline", "--plot=False", f"--out_dir={tmp_path}"]
    assert limits.limits.main(arguments) == 0
    (row,) = json.loads((tmp_path / "limits.json").read_text())["rows"]
    assert row.keys() == {"step", *ROW}, row


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--steps=baseline,magic", "there is no step 'magic'; there are baseline, accumulate"),
        ("--batch_size=9", "--batch_size=9 does not divide into --micro_steps=4"),
        ("--segments=9", "--segments at most --n_layer"),
        ("--ranks=0", "--ranks=0: expected at least 1"),
    ],
)
def test_mistakes_are_named(argument, message):
    settings = limits.borrowed.parse(limits.steps.LimitSettings, [argument])
    with pytest.raises(UserError, match=re.escape(message)):
        limits.steps.check(settings)
