"""`libddp run --preload`: forked workers are what started ones are."""

import errno
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launches import finish, launch, ranks
from libddp._process_states import state_of
from libddp.errors import ArgumentError

from libddp import _in_place, _preload, _rendezvous, _spare_workers

#: Everything that a program can see of how it was started.
FACTS = """
import atexit, json, multiprocessing, os, sys
import beside

class Mine:
    pass

def child(mine, queue):
    queue.put([type(mine).__name__, os.environ["RANK"]])

if __name__ == "__main__":
    import numpy, torch
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=child, args=(Mine(), queue))
    process.start()
    facts = {
        "argv": sys.argv, "file": __file__, "path": sys.path[0], "child": queue.get(timeout=60),
        "package": __package__, "spec": getattr(__spec__, "name", None),
        "omp": [os.environ["OMP_NUM_THREADS"], torch.get_num_threads()],
        "leader": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(),
        "threads": len(os.listdir("/proc/self/task")) >= 1,
        "write": sys.stdout.write_through, "main": sys.modules["__main__"].Mine is Mine,
        "stdin": os.fstat(0).st_rdev, "docstring": __doc__, "builtins": print is not None,
    }
    process.join()
    name = os.environ["RANK"]
    json.dump([facts, numpy.random.random(), torch.initial_seed()], open(f"facts{name}", "w"))
    atexit.register(lambda: open(f"ended{name}", "w").close())
    sys.exit(0)
"""


def launched(folder, *arguments, number=2, forks_server=False, **environment):
    command = [*ranks(number), *arguments]
    job = launch(command, folder, forks_server=forks_server, **environment)
    ((status, output),) = finish(job, deadline=300)
    return status, output


@pytest.mark.parametrize("program", [["job/train.py", "--lr", "1"], ["-m", "job.train", "a b"]])
def test_a_forked_worker_sees_what_a_started_one_sees(tmp_path, program):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text(FACTS)
    for folder in (tmp_path, tmp_path / "job"):
        (folder / "beside.py").touch()
    found = {}
    for flags in ([], ["--preload"]):
        status, output = launched(tmp_path, *flags, *program)
        assert status == 0, output
        files = [tmp_path / f"facts{rank}" for rank in "01"]
        found[bool(flags)] = [json.loads(file.read_text()) for file in files]
        for rank in "01":
            (tmp_path / f"ended{rank}").unlink()  # atexit ran
    assert [facts for facts, *_ in found[True]] == [facts for facts, *_ in found[False]]
    for first, second in zip(*(drawn for _, *drawn in found[True]), strict=True):
        assert first != second  # each rank draws numbers of its own


RESTARTED = """
import os, sys
print("out", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
print("err", os.environ["RANK"], file=sys.stderr)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import time
    open("up-" + os.environ["RANK"], "w").close()
    while not (os.path.exists("up-0") and os.path.exists("up-1")):
        time.sleep(0.01)
    time.sleep(1)  # the launcher has heard of both: a parent that dies earlier ends the run
    os.kill(os.getppid() if "parent" in sys.argv else os.getpid(), 9)
    time.sleep(600)
sys.exit(3)
"""


@pytest.mark.parametrize("who", ["worker", "parent"])
def test_what_was_killed_is_forked_again_and_logs_are_kept(tmp_path, who):
    (tmp_path / "train.py").write_text(RESTARTED)
    flags = ["--preload", "--max-restarts=1", "--log-dir=logs", "--redirects=3", "--tee=1"]
    command = [*flags, "train.py", who]
    status, output = launched(tmp_path, *command, forks_server=who == "worker")
    assert status == 3, output
    assert "out 0 1" in output
    logs = {path.name: path for path in (tmp_path / "logs").glob("*/attempt_1/1/*")}
    assert logs["stdout.log"].read_text() == "out 1 1\n"
    assert logs["stderr.log"].read_text() == "err 1\n"
    assert "of libddp run: 3" in output


STEPS = """
import os, sys
import torch
import libddp

before = set(sys.modules)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
libddp.Snapshot
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
kept = open("kept-" + start, "w")  # not closed
print(*sorted(set(sys.modules) - before), file=kept)
if start == "0":
    raise ValueError("no such token")
"""


def test_a_first_step_imports_nothing_and_what_is_preloaded_ends_quietly(tmp_path):
    """After an error, and in order."""
    (tmp_path / "train.py").write_text(STEPS)
    status, output = launched(tmp_path, "--preload", "--max-restarts=1", "train.py", number=1)
    assert status == 0, output
    assert "ValueError: no such token" in output
    for start in "01":
        imported = (tmp_path / f"kept-{start}").read_text()
        assert imported.endswith("\n")
        assert [name for name in imported.split() if name.startswith(("torch.", "libddp."))] == []
    assert "nanobind" not in output  # triton's bindings, of what is not collected
    assert "leaked" not in output


RAISES = """
import torch

def deep():
    raise ValueError("no such token")

deep()
"""


def test_a_traceback_shows_the_program_only(tmp_path):
    (tmp_path / "train.py").write_text(RAISES)
    status, output = launched(tmp_path, "--preload", "train.py", number=1)
    assert status == 1
    assert "_fork_server" not in output
    assert "runpy" not in output
    assert f"  at:   {tmp_path}/train.py:5\n" in output
    trace = output[output.index("Traceback") :].splitlines()
    assert [line.strip() for line in trace if 'File "' in line] == [
        f'File "{tmp_path}/train.py", line {line}, in {name}'
        for line, name in ((7, "<module>"), (5, "deep"))
    ] or "rank0" in trace[1]


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (["-m", "no_such_module"], "No module named no_such_module"),
        (["broken.py"], "SyntaxError"),
    ],
)
def test_a_program_that_cannot_begin_says_so(tmp_path, program, told):
    (tmp_path / "broken.py").write_text("def (:\n")
    command = ["--preload", *program]
    status, output = launched(tmp_path, *command, number=1, forks_server=True)
    assert status == 1
    assert told in output
    assert "libddp run: failed" in output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n",
            "--preload: a module that is preloaded has initialised CUDA, which forked workers "
            "could not use. Hint: leave it out of --preload-modules.",
        ),
        ("raise OSError('no cache')\n", "the parent of the workers ended (1) as it imported torch"),
    ],
)
def test_a_preloaded_module_that_forbids_forking_is_told(tmp_path, text, told):
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "train.py").write_text("open('ran', 'w').close()\n")
    flags = ["--preload", "--preload-modules=torch,mine"]
    status, output = launched(tmp_path, *flags, "train.py", number=1)
    assert status != 0
    assert told in output
    assert not (tmp_path / "ran").exists()


def arguments(**given):
    plain = {"no_python": False, "run_path": False, "numa_binding": None, "module": False}
    return SimpleNamespace(**plain | {"training_script": __file__} | given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"no_python": True}, "--no-python starts another program"),
        ({"run_path": True}, "--run-path"),
        ({"numa_binding": "node"}, "--numa-binding"),
        ({"training_script": os.path.dirname(__file__)}, "is a folder or an archive"),
    ],
)
def test_what_cannot_be_forked_is_refused(given, told):
    with pytest.raises(ArgumentError, match=f"--preload forks workers, but .*{told}"):
        _preload.check(arguments(**given))


def test_what_can_be_forked_is_not_refused(monkeypatch):
    _preload.check(arguments())
    monkeypatch.setenv("PYTHON_EXEC", "/bin/sh")
    with pytest.raises(ArgumentError, match="PYTHON_EXEC=/bin/sh is not the Python"):
        _preload.check(arguments())


@pytest.mark.parametrize(
    ("check", "flag", "given"),
    [
        (_preload.check, "--preload", {}),
        (_in_place.check, "--in-place", {"node_unit": 1, "rdzv_backend": _rendezvous.NAME}),
    ],
)
def test_a_system_without_pidfds_is_told(monkeypatch, check, flag, given):
    def refuse(_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(ArgumentError, match=f"{flag} watches workers by pidfd_open, which this"):
        check(arguments(**given))
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(ArgumentError, match=f"Hint: leave out {flag}"):
        check(arguments(**given))


@pytest.fixture
def server():
    made = _preload.ForkServer(["json"])
    yield made
    made.end()


def test_a_forked_worker_is_waited_for_as_popens(server, tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, sys, time\n"
        "os.write(1, b'up\\n')  # a line at once: print() writes its end by itself\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(5)\n"
    )
    command = (sys.executable, "-u", str(script))
    with open(tmp_path / "out", "w+b") as out:
        long = server.start((*command, "600"), dict(os.environ), stdout=out)
        short = server.start((*command, "0"), dict(os.environ), stdout=out)
    assert short.wait() == 5
    assert short.poll() == 5
    assert long.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        long.wait(0.1)
    long.send_signal(15)
    assert long.wait(60) == -15
    assert set((tmp_path / "out").read_text().split()) <= {"up"}


def test_a_worker_has_no_descriptors_of_the_server(server, tmp_path):
    script = tmp_path / "descriptors.py"
    script.write_text("import os; print(sorted(os.listdir('/proc/self/fd'), key=int))")
    with open(tmp_path / "out", "w+b") as out:
        for _ in range(2):
            worker = server.start((sys.executable, "-u", str(script)), dict(os.environ), stdout=out)
            assert worker.wait(60) == 0
        out.seek(0)
        first, second = out.read().decode().splitlines()
    assert first == second  # 0, 1, 2 and that of the listing
    assert len(json.loads(first.replace("'", '"'))) == 4


@pytest.fixture
def sparing():
    made = _preload.ForkServer(["json"], num_spares=2)
    yield made
    made.end()


def children(server) -> set[int]:
    """Of the server, those that have ended and were not waited for among them."""
    pid = server._process.pid
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def await_children(server, number: int) -> set[int]:
    limit = time.monotonic() + 60
    while len(children(server)) != number:
        assert time.monotonic() < limit, children(server)
        time.sleep(0.02)
    return children(server)


def await_end(pids) -> None:
    limit = time.monotonic() + 60
    while any(state_of(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < limit, pids
        time.sleep(0.01)


def test_the_id_of_a_worker_is_its_own_until_the_launcher_knows_its_end(server, tmp_path):
    script = tmp_path / "end.py"
    script.write_text("import os, sys; os.kill(os.getpid(), 9) if sys.argv[1:] else sys.exit(3)")
    for arguments, code in (((), 3), (("killed",), -9)):
        worker = server.start((sys.executable, "-u", str(script), *arguments), dict(os.environ))
        assert select.select([server._channel], [], [], 60)[0]  # the server has told it
        os.killpg(worker.pid, 0)
        assert worker.poll() == code
        await_children(server, 0)


def test_a_server_ends_quietly_where_nobody_asked_how_a_worker_ended(server, capfd):
    worker = server.start((sys.executable, "-u", "-m", "this"), dict(os.environ))
    await_end([worker.pid])
    assert select.select([server._channel], [], [], 60)[0]
    capfd.readouterr()
    server.end()
    assert server._process.returncode == 0
    assert capfd.readouterr().err == ""


@pytest.fixture
def sleeping(tmp_path):
    """The command line of a worker that says its numbers, and sleeps."""
    script = tmp_path / "sleep.py"
    script.write_text(
        "import os, sys, time\n"
        "open_ones = sorted(os.listdir('/proc/self/fd'), key=int)\n"
        "facts = [os.getsid(0) == os.getpid(), os.environ['WHO'], open_ones, *sys.argv[1:]]\n"
        "os.write(1, repr(facts).encode() + b'\\n')\n"
        "time.sleep(600)\n"
    )
    return (sys.executable, "-u", str(script))


def test_workers_are_forked_ahead_and_then_are_what_others_are(sparing, sleeping, tmp_path):
    spares, facts = await_children(sparing, 2), []
    for number in range(3):  # the last one while no spare is left
        path = tmp_path / f"out{number}"
        with open(path, "w+b") as out:
            environment = os.environ | {"WHO": str(number)}
            worker = sparing.start((*sleeping, str(number)), environment, stdout=out)
        assert (worker.pid in spares) == (number < 2)
        while not path.read_bytes().endswith(b"\n"):
            time.sleep(0.01)
        facts.append(eval(path.read_text()))
        worker.send_signal(9)
        assert worker.wait(60) == -9
    descriptors = facts[0][2]
    assert facts == [[True, str(n), descriptors, str(n)] for n in range(3)]
    assert not await_children(sparing, 2) & spares  # the next ones


def test_a_spare_worker_that_somebody_ends_is_replaced(sparing, sleeping):
    first = await_children(sparing, 2)
    for pid in first:
        os.kill(pid, 9)
    await_end(first)
    workers = [sparing.start(sleeping, os.environ | {"WHO": ""}) for _ in range(2)]
    assert not {worker.pid for worker in workers} & first
    for worker in workers:
        worker.send_signal(15)
        assert worker.wait(60) == -15
    assert not await_children(sparing, 2) & first


def test_where_the_system_refuses_more_processes_no_spare_is_there(monkeypatch):
    def refuse():
        raise BlockingIOError("no more")

    left = []
    spares = _spare_workers.SpareWorkers(2, lambda: left.append(1))
    monkeypatch.setattr(_spare_workers, "fork_leader", refuse)
    open_ones = len(os.listdir("/proc/self/fd"))
    assert spares.is_short()
    assert spares.add() is None
    assert not spares.is_short()
    assert spares.take([0]) is None
    assert len(os.listdir("/proc/self/fd")) == open_ones
    assert not left


@pytest.mark.parametrize("is_killed", [False, True])
def test_spare_workers_end_with_the_server(sparing, is_killed):
    pids = await_children(sparing, 2)
    if is_killed:
        sparing._process.kill()
    else:
        sparing.end()
    await_end(pids)


def test_a_host_joins_others_when_it_can_fork(monkeypatch):
    """Hosts that train already stop for it as it comes to the meeting."""
    from libddp._torch_patches import agent_hooks

    from libddp import _hosts, run

    order, meet = [], []
    server = SimpleNamespace(wait_until_ready=lambda: order.append("ready"))
    monkeypatch.setattr(agent_hooks, "around_rendezvous", meet.append)
    for name in ("stop_within", "wake_at_ends", "excuse_failures", "tell_ends"):
        monkeypatch.setattr(agent_hooks, name, lambda *_: None)
    workers = SimpleNamespace(tell=None, failed=dict, number=0)
    args = run.parse(["--preload", "--nnodes=1:2", "train.py"])
    run.watch_attempts(args, workers, _hosts.Hosts(), server)
    met = lambda: order.append("met")  # noqa: E731
    monkeypatch.setattr(run._rendezvous, "meeting", lambda: 7)
    meet[0](SimpleNamespace(), met)
    assert (order, workers.number) == (["ready", "met"], 7)
