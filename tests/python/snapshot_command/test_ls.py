"""libddp snapshot ls."""

import json

import saved_runs


def test_a_folder(saved, command):
    status, printed = command("ls", saved / "run")
    assert (status, printed.err) == (0, "")
    lines = printed.out.splitlines()
    assert lines[0].startswith(f"{saved / 'run'}: 2 snapshots, ")
    assert lines[1].split() == ["step", "save", "size", "ranks", "stored"]
    assert lines[2].split()[:2] == ["7", "2"]
    assert lines[3].split()[:2] == ["5", "1"]
    assert lines[2].split()[4] == "2"
    run = (saved / "run" / "run").read_text().strip()
    assert lines[4] == f"memory: this host has no keeper of run {run}"


def test_json(saved, command):
    status, printed = command("ls", saved / "run", "--json")
    assert status == 0
    found = json.loads(printed.out)
    assert [(each["step"], each["save"]) for each in found["snapshots"]] == [(7, 2), (5, 1)]
    newest = found["snapshots"][0]
    path = saved / "run" / "step-7.2"
    assert newest["path"] == str(path)
    assert newest["ranks"] == 2
    assert newest["bytes"] == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert newest["time"] == (path / "index.json").stat().st_mtime
    assert newest["error"] is None
    assert (found["keeper"], found["unfinished"], found["errors"]) == (None, [], [])
    assert printed.out.count("\n") == 1


def test_what_is_unfinished(folder, command):
    part = folder / "step-9.3.4f2a.part"
    part.mkdir()
    (part / "rank-0.json").write_text("{}")
    (part / "rank-0-of-2.safetensors").write_bytes(bytes(2048))
    (part / "rank-1-of-2.safetensors.part").write_bytes(bytes(2048))
    (folder / "step-3.1.old.part").mkdir()
    (folder / "step-x.1").mkdir()
    status, printed = command("ls", folder)
    assert status == 0
    assert (
        "step 9 (save 3): unfinished, of start 4f2a: 1 of 2 ranks stored, 4.00 KiB" in printed.out
    )
    assert "step 3 (save 1): being removed" in printed.out
    assert "step-x" not in printed.out
    parts = json.loads(command("ls", folder, "--json")[1].out)["unfinished"]
    assert [part["stored_ranks"] for part in parts] == [[0], []]


def test_folders_without_snapshots(saved, tmp_path, command):
    status, printed = command("ls", tmp_path)
    assert (status, printed.out) == (0, f"{tmp_path}: no snapshots of libddp.Snapshot\n")
    status, printed = command("ls", saved / "old")
    assert status == 0
    assert "index.json: a snapshot in save_snapshot's earlier format, " in printed.out
    assert ", 2 ranks, " in printed.out


def test_a_truncated_index(folder, command):
    path = folder / "step-7.2" / "index.json"
    path.write_bytes(path.read_bytes()[:100])
    status, printed = command("ls", folder)
    assert status == 1
    assert printed.err.startswith(f"libddp snapshot ls: libddp snapshot: {path}: not JSON: ")
    lines = printed.out.splitlines()
    assert lines[2].split()[:3] == ["7", "2", "damaged"]
    assert lines[3].split()[:2] == ["5", "1"]


def test_wrong_input(saved, tmp_path, command):
    file = saved / "run" / "run"
    for arguments, text in (
        ((tmp_path / "nowhere",), "nowhere is no folder. Hint: pass the folder that libddp"),
        ((file,), "run is a file. Hint: "),
        (("--run", "nobody-has-this"), "this host has no keeper of run 'nobody-has-this'. Hint"),
        (("--run", "a b"), "is no name of a run"),
    ):
        status, printed = command("ls", *arguments)
        assert status == 1
        assert printed.err.startswith("libddp snapshot ls: ")
        assert text in printed.err
    (tmp_path / "run").write_text("two words\n")
    status, printed = command("ls", tmp_path)
    assert status == 1
    assert "it is no name of a run" in printed.err
    assert "no snapshots" in printed.out


def test_an_old_index_that_is_odd(tmp_path, command):
    for text in ("[" * 100_000, "[]", '{"format": "libddp-snapshot"}', "\xff"):
        (tmp_path / "index.json").write_text(text, encoding="latin-1")
        assert command("ls", tmp_path)[1].out.endswith("no snapshots of libddp.Snapshot\n")
    text = (
        '{"format": "libddp-snapshot", "version": 1, "files": {"a": "x"}, "world_size": "\\u001b"}'
    )
    (tmp_path / "index.json").write_text(text)
    status, printed = command("ls", tmp_path)
    assert status == 0
    assert "a snapshot in save_snapshot's earlier format, -, 0 ranks" in printed.out
    assert saved_runs.ODD_NAME not in printed.out
