"""libddp snapshot persist, and the memory that ls shows."""

import contextlib
import io
import json
import os
import secrets
import signal

import pytest
import ranks
import saved_runs
import torch
from libddp.__main__ import main
from libddp._snapshot_command import _keeper

import libddp


@pytest.fixture
def job(tmp_path):
    """A job of one rank that saves to memory."""
    with libddp.Snapshot(tmp_path / "run", linger=5) as snapshot:
        for step in (1, 2, 3):
            snapshot.save(step, torch.nn.Linear(4, 4))
        yield snapshot


def test_what_memory_has(job, tmp_path, command):
    folder = tmp_path / "run"
    status, printed = command("ls", folder)
    assert status == 0
    assert "no snapshots" in printed.out
    assert "memory: keeper of run " in printed.out
    assert f"rank 0: process {os.getpid()}" in printed.out
    row = printed.out.splitlines()[-1].split()
    assert row[:2] == ["0", "1"]
    assert "step 3 (save 3), step 2 (save 2)" in printed.out

    for _ in range(2):  # the second time it is there already
        status, printed = command("persist", folder)
        assert (status, printed.err) == (0, "")
        stored = folder / "step-3.3"
        assert printed.out == f"{stored}: step 3 (save 3) of 1 ranks is stored\n"
        assert stored.is_dir()
    job.save(4, torch.nn.Linear(4, 4))
    assert command("persist", folder)[0] == 0
    assert command("verify", folder, "--all")[0] == 0

    found = json.loads(command("ls", folder, "--json")[1].out)
    assert [each["step"] for each in found["snapshots"]] == [4, 3]
    assert found["keeper"]["run"] == found["run"]
    assert found["keeper"]["ranks"][0]["stored"] == {"step": 4, "sequence": 4}
    # The job goes on as if nobody had asked.
    job.save(5, torch.nn.Linear(4, 4), storage=True)
    job.wait(60)
    assert command("show", folder, "--step", "5")[0] == 0


def persist(folder):
    """Two ranks that save to memory; rank 0 asks between their saves."""
    from libddp.distributed import barrier, destroy_process_group, init_process_group

    init_process_group("libddp")
    model = torch.nn.Linear(300, 300)
    statuses = []
    with libddp.Snapshot(folder, keep=20, linger=5) as snapshot:
        for step in range(1, 6):
            snapshot.save(step, model)
            barrier()
            if torch.distributed.get_rank() == 0:
                statuses.append(main(["snapshot", "persist", folder]))
            barrier()
    destroy_process_group()
    return statuses


def test_two_ranks(tmp_path, command):
    folder = tmp_path / "run"
    assert ranks.run(persist, 2, str(folder))[0] == [0] * 5
    found = json.loads(command("ls", folder, "--json")[1].out)
    assert [(each["step"], each["ranks"]) for each in found["snapshots"]] == [
        (step, 2) for step in (5, 4, 3, 2, 1)
    ]
    assert command("verify", folder, "--all")[0] == 0


def save_all_the_time(folder):
    """Two ranks that save to memory as fast as they can, while rank 0 asks again and again."""
    import threading

    from libddp.distributed import all_reduce, destroy_process_group, init_process_group

    init_process_group("libddp")
    model, is_over = torch.nn.Linear(500, 500), torch.zeros(1)
    statuses = []

    def ask():
        for _ in range(5):
            statuses.append(main(["snapshot", "persist", folder, "--timeout", "60"]))

    with libddp.Snapshot(folder, keep=20, linger=5) as snapshot:
        snapshot.save(0, model)
        thread = threading.Thread(target=ask)
        if torch.distributed.get_rank() == 0:
            thread.start()
        for step in range(1, 100_000):
            snapshot.save(step, model)
            is_over[0] = float(len(statuses) == 5)
            all_reduce(is_over)
            if is_over.item():
                break
    if thread.ident:
        thread.join(60)
    destroy_process_group()
    return statuses


def test_while_it_saves(tmp_path, command):
    folder = tmp_path / "run"
    assert ranks.run(save_all_the_time, 2, str(folder))[0] == [0] * 5
    status, printed = command("verify", folder, "--all")
    assert status == 0
    assert 1 <= printed.out.count(": whole;") <= 5


def persist_between_hosts(folder):
    """Two ranks, each on a host of its own; returns what the command says there."""
    ranks.live_apart()
    from libddp.distributed import barrier, destroy_process_group, init_process_group

    init_process_group("gloo")
    rank, said = torch.distributed.get_rank(), []
    with libddp.Snapshot(folder, linger=5) as snapshot:
        snapshot.save(1, torch.nn.Linear(4, 4))
        for turn, timeout in ((0, "0.5"), (1, "60"), (0, "60")):
            barrier()
            if rank == turn:
                out, err = io.StringIO(), io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    status = main(["snapshot", "persist", folder, "--timeout", timeout])
                said.append((status, out.getvalue(), err.getvalue()))
        barrier()
    destroy_process_group()
    return said


def test_each_host_stores_its_part(tmp_path, command):
    folder = tmp_path / "run"
    (early, late), (other,) = ranks.run(persist_between_hosts, 2, str(folder))
    assert early[0] == 1
    assert "step 1 (save 1) was not stored within 0.5 s. Hint: it waits for 1 other" in early[2]
    assert other[0] == 0
    assert "step 1 (save 1)" in other[1]
    assert late == (0, f"{folder}/step-1.1: step 1 (save 1) of 2 ranks is stored\n", "")
    assert command("verify", folder)[0] == 0


def test_no_keeper(tmp_path, command):
    folder = tmp_path / "run"
    folder.mkdir()
    status, printed = command("persist", folder)
    assert status == 1
    assert "does not say which job stores there. Hint: " in printed.err
    status, printed = command("persist", folder, "--run", "nobody-has-this")
    assert status == 1
    assert "this host has no keeper of run 'nobody-has-this'. Hint: " in printed.err
    status, printed = command("persist", tmp_path / "nowhere")
    assert status == 1
    assert "nowhere is no folder" in printed.err


def test_a_keeper_that_has_ended(tmp_path, command):
    folder = tmp_path / "run"
    with libddp.Snapshot(folder, linger=5) as snapshot:
        snapshot.save(1, torch.nn.Linear(4, 4))
    name = (folder / "run").read_text().strip()
    saved_runs.wait_until(lambda: _keeper.connect(name) is None)
    status, printed = command("persist", folder)
    assert status == 1
    assert f"this host has no keeper of run '{name}'" in printed.err


def test_a_job_without_a_folder(tmp_path, command):
    name = f"test-{secrets.token_hex(6)}"
    with libddp.Snapshot(run=name, linger=5) as snapshot:
        snapshot.save(1, torch.nn.Linear(4, 4))
        status, printed = command("persist", tmp_path, "--run", name)
        assert status == 1
        assert f"run '{name}' stores in no folder. Hint: make its Snapshot with one" in printed.err
        status, printed = command("ls", "--run", name)
        assert (status, printed.err) == (0, "")
        assert "step 1 (save 1)" in printed.out


def test_a_folder_that_cannot_be_written(job, tmp_path, command):
    folder = tmp_path / "run"
    moved = folder.rename(tmp_path / "moved")
    folder.write_text("in the way")
    run = (moved / "run").read_text().strip()
    status, printed = command("persist", moved, "--run", run)
    assert status == 1
    assert f"{folder}/step-3.3." in printed.err
    status, printed = command("ls", moved)
    assert f"not stored, ranks 0: libddp snapshot: {folder}/step-3.3." in printed.out
    folder.unlink()
    moved.rename(folder)
    assert command("persist", folder)[0] == 0
    assert command("verify", folder, "--step", "3")[0] == 0


def test_a_keeper_that_does_not_answer(job, tmp_path, command, monkeypatch):
    monkeypatch.setattr(_keeper, "_PATIENCE", 0.5)
    pid = job.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        status, printed = command("persist", tmp_path / "run")
        assert status == 1
        assert "does not answer. Hint: look at the state of the process" in printed.err
        status, printed = command("ls", tmp_path / "run")
        assert status == 1
        assert "does not answer" in printed.err
        assert "no snapshots" in printed.out
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert command("persist", tmp_path / "run")[0] == 0
