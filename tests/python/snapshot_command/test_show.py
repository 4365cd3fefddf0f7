"""libddp snapshot show."""

import pytest
import saved_runs

import libddp


def test_the_newest(saved, command):
    status, printed = command("show", saved / "run")
    assert (status, printed.err) == (0, "")
    lines = printed.out.splitlines()
    assert lines[0].startswith(f"{saved / 'run' / 'step-7.2'}: step 7 (save 2), ")
    assert lines[1] == "ranks: 2, of which 0-1 stored something"
    wanted = saved_runs.build().state_dict()
    shown = {line.split()[0]: line.split(maxsplit=3) for line in lines[4:] if len(line.split()) > 3}
    for name, value in wanted.items():
        if name in ("lm_head.weight", "head.weight"):
            continue
        entry = shown[f"model.{name}"]
        assert entry[1] == "F32"
        assert entry[2] == ("x".join(map(str, value.shape)) or "scalar")
    assert "exp_avg_sq" in printed.out
    assert "values of rank 0" in printed.out
    assert "'step': 7" in printed.out


def test_another_step_and_rank(saved, command):
    status, printed = command("show", saved / "run", "--step", "5", "--rank", "1")
    assert status == 0
    assert "step 5 (save 1)" in printed.out
    assert "values of rank 1" in printed.out
    assert "'step': 5" in printed.out


def test_nothing_long_and_nothing_raw(saved, command):
    printed = command("show", saved / "run")[1].out
    assert "\x1b" not in printed
    assert saved_runs.LONG[:100] not in printed
    assert "... 4940 more" in printed
    assert "[0, 1, 2, 3, 4, 5, ... 994 more]" in printed
    assert "odd\\x1b[2J\\nname" in printed


def test_odd_names_of_tensors(tmp_path, command):
    with libddp.Snapshot(tmp_path / "run", linger=5) as snapshot:
        snapshot.save(1, saved_runs.OddModel(), storage=True)
        snapshot.wait(60)
    status, printed = command("show", tmp_path / "run")
    assert status == 0
    assert "\x1b" not in printed.out
    line = next(line for line in printed.out.splitlines() if "model.odd" in line)
    assert line.split() == ["model.odd\\x1b[2J\\nname", "F32", "2x3", "all:", "0"]


@pytest.mark.parametrize("subcommand", ["show", "verify", "export"])
def test_wrong_input(subcommand, saved, folder, tmp_path, command):
    more = [tmp_path / "out.safetensors"] if subcommand == "export" else []
    empty = tmp_path / "empty"
    empty.mkdir()
    (folder / "step-7.2" / "index.json").write_text('{"format": "libddp-snapshot", "version": 3}')
    for place, options, text in (
        (tmp_path / "nowhere", [], "nowhere is no folder. Hint: "),
        (empty, [], "has no snapshot that is whole. Hint: save with storage=True"),
        (saved / "run", ["--step", "6"], "has no snapshot of step 6. Hint: it has 7, 5."),
        (
            saved / "old",
            [],
            "a snapshot in save_snapshot's earlier format, which has no checksums. Hint: ",
        ),
        (saved / "run" / "step-7.2", [], "is one snapshot. Hint: pass the folder that it is in"),
        (folder, [], "it is of version 3, this is version 2"),
    ):
        status, printed = command(subcommand, place, *more, *options)
        assert status == 1
        assert printed.err.startswith(f"libddp snapshot {subcommand}: ")
        assert text in printed.err
    assert not (tmp_path / "out.safetensors").exists()


def test_a_rank_that_is_not_there(saved, command):
    status, printed = command("show", saved / "run", "--rank", "2")
    assert status == 1
    assert "rank 2 stored nothing. Hint: those that did are 0-1." in printed.err
