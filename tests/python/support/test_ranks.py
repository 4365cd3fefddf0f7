"""The helper itself: values, errors, environments, and a rank that never ends."""

import atexit
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
from rank_server import RankServer


def add(number):
    return int(os.environ["RANK"]) + number


def fail():
    raise ValueError("no such thing")


def hang():
    time.sleep(600)


def test_values_come_back_in_rank_order():
    assert ranks.run(add, 2, 10) == [10, 11]


def test_an_error_comes_back_with_its_class_and_text():
    (outcome,) = ranks.launch(fail, 1)
    assert (outcome.error, outcome.message) == ("ValueError", "no such thing")
    assert {"ValueError", "Exception"} <= set(outcome.bases)
    assert outcome.failed
    assert not outcome.timed_out
    with pytest.raises(ranks.RanksError, match=r"rank 0: .*no such thing"):
        raise ranks.RanksError(ranks.describe(outcome))


def test_a_rank_prints_nothing_of_its_own():
    assert [outcome.output for outcome in ranks.launch(add, 2, 10)] == ["", ""]


def test_a_rank_that_hangs_is_ended_at_the_deadline():
    started = time.monotonic()
    with pytest.raises(ranks.RanksError, match=r"(?s)rank 0: timed out.* in hang") as caught:
        ranks.run(hang, 1, deadline=5)
    assert time.monotonic() - started < 100, caught.value


def is_forked() -> bool:
    """A fresh interpreter has nothing of the server's modules that the test does not ask for."""
    return "torch._dynamo" in sys.modules


def test_ranks_start_anew_for_what_libraries_read_when_they_are_loaded():
    assert ranks.run(is_forked, 1) == [True]
    assert ranks.run(is_forked, 1, env={"LIBDDP_LOG_LEVEL": "INFO"}) == [True]
    assert ranks.run(is_forked, 1, env={"OMP_NUM_THREADS": "2"}) == [False]


def leave_in_disorder(folder):
    """A rank of a server's other users: nobody catches what it raises."""
    atexit.register((Path(folder) / "handled").touch)
    raise LookupError("no such token")


def test_a_rank_ends_as_every_interpreter_does(tmp_path):
    for anew in (False, True):
        output, stamp = tmp_path / f"output-{anew}", tmp_path / f"stamp-{anew}"
        rank = RankServer.get().start(
            "test_ranks:leave_in_disorder",
            str(tmp_path),
            environment=dict(os.environ),
            output=output,
            anew=anew,
            modules=("test_ranks",),
            exit_stamp=stamp,
        )
        assert rank.wait(100) == 1
        assert "LookupError: no such token" in output.read_text()
        (tmp_path / "handled").unlink()
        assert 0 < float(stamp.read_text()) <= time.monotonic()


def note_and_hang(folder):
    """With a child of its own."""
    child = subprocess.Popen(["sleep", "600"])
    for pid in (os.getpid(), child.pid):
        (Path(folder) / f"{pid}.pid").touch()
    time.sleep(600)


def start_and_wait(folder):
    """What a benchmark's process does: a forked rank, and one that starts anew."""
    call = (__file__, "note_and_hang", (folder,))
    (Path(folder) / "call").write_bytes(pickle.dumps(call))
    children = [
        ranks.start_child(folder, rank, 2, 0, env)
        for rank, env in enumerate(({}, {"STARTS": "anew"}))
    ]
    for child in children:
        child.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_parent(tmp_path, number):
    code = f"import test_ranks; test_ranks.start_and_wait({str(tmp_path)!r})"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 300
        while len(noted := list(tmp_path.glob("*.pid"))) < 4:
            assert parent.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        running = [os.pidfd_open(int(path.stem)) for path in noted]
        parent.send_signal(number)
        parent.wait(60)
        poll = select.poll()
        for descriptor in running:
            poll.register(descriptor, select.POLLIN)
        while running and (ended := poll.poll(60_000)):
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                running.remove(descriptor)
                os.close(descriptor)
        assert not running
    finally:
        parent.kill()
        for path in tmp_path.glob("*.pid"):
            end_process(int(path.stem))


def end_process(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
