"""A stranger at the port of the launchers, with torch's own client: nothing of theirs runs."""

import base64
import contextlib
import os
import pickle
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
from forked_program import ForkedProgram
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from libddp import _rendezvous, _run_key

RUN_ID = "a-run"


class MakesFile:
    """Unpickled, it makes a file: what a stranger would have run instead."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def evil(path: Path) -> str:
    return base64.b64encode(pickle.dumps(MakesFile(path))).decode()


def client(port: int) -> TCPStore:
    return TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["with a key", "without"])
def backends(request, store, tmp_path, monkeypatch):
    monkeypatch.delenv(_run_key.DESCRIPTOR, raising=False)
    if request.param == "without":
        monkeypatch.delenv(_run_key.FILE, raising=False)
    else:
        path = tmp_path / "run.key"
        path.write_bytes(os.urandom(40) + b"x")
        path.chmod(0o600)
        monkeypatch.setenv(_run_key.FILE, str(path))
    return [_rendezvous.Backend(store, RUN_ID) for _ in range(2)]


def state_of_round(number: int) -> bytes:
    """As torch writes one."""
    state = dynamic._RendezvousState()
    state.round = number
    node = dynamic._NodeDesc("host", 7, 0)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.last_heartbeats[node] = dynamic.datetime.now(dynamic.timezone.utc)
    state.deadline = dynamic.datetime.now(dynamic.timezone.utc)
    return pickle.dumps(state)


def round_of(found) -> int | None:
    return None if found is None else pickle.loads(found[0]).round


def test_launchers_agree_as_they_do_over_torchs_backend(backends):
    one, two = backends
    assert one.get_state() is None
    _, token, is_set = one.set_state(state_of_round(1))
    assert (is_set, round_of(two.get_state())) == (True, 1)
    assert two.set_state(state_of_round(5), b"not the token")[2] is False
    newer = two.set_state(state_of_round(2), two.get_state()[1])
    assert newer[2] is True
    late = one.set_state(state_of_round(3), token)  # made from what is no longer there
    assert (late[2], round_of(late)) == (False, 2)
    assert one.set_state(state_of_round(3), late[1])[2] is True
    assert round_of(two.get_state()) == 3


def forgeries(tmp_path, older):
    yield evil(tmp_path / "ran")
    yield "no base64 at all!"
    yield b"\xff\xfe\x00"
    yield base64.b64encode(pickle.dumps({"participants": {}})).decode()
    yield _rendezvous.Backend._NULL_SENTINEL
    yield ""
    if older is not None:
        yield older


def test_what_a_stranger_writes_is_put_back(backends, store, tmp_path, capfd):
    one, two = backends
    key = one._key
    one.set_state(state_of_round(1))
    older = store.get(key) if _run_key.has_key() else None
    one.set_state(state_of_round(2), one.get_state()[1])
    assert round_of(two.get_state()) == 2
    good = store.get(key)
    for forged in forgeries(tmp_path, older):
        store.set(key, forged)
        assert round_of(one.get_state()) == 2, forged
        assert store.get(key) == good, forged
        store.set(key, forged)
        # A write that the forgery spoils is tried again, as after any other's write.
        _, token, is_set = two.set_state(state_of_round(4), good)
        assert not is_set
        assert two.set_state(state_of_round(2), token)[2]
        assert round_of(one.get_state()) == 2
        good = store.get(key)
    store.delete_key(key)
    assert round_of(two.get_state()) == 2
    assert not (tmp_path / "ran").exists()
    assert "event=rendezvous_entry_refused" in capfd.readouterr().err


def test_a_launcher_that_comes_after_the_stranger_starts_all_the_same(backends, store, tmp_path):
    one, _ = backends
    store.set(one._key, evil(tmp_path / "ran"))
    assert one.get_state() is None
    assert one.set_state(state_of_round(1))[2] is True
    assert not (tmp_path / "ran").exists()


def test_a_state_with_a_seal_of_another_key_or_run_is_none(store, tmp_path, monkeypatch):
    path = tmp_path / "run.key"
    path.write_bytes(os.urandom(40) + b"x")
    path.chmod(0o600)
    monkeypatch.setenv(_run_key.FILE, str(path))
    monkeypatch.delenv(_run_key.DESCRIPTOR, raising=False)
    other_run = _rendezvous.Backend(store, "another-run")
    other_run.set_state(state_of_round(1))
    backend = _rendezvous.Backend(store, RUN_ID)
    store.set(backend._key, store.get(other_run._key))
    assert backend.get_state() is None
    unsealed = base64.b64encode(state_of_round(1)).decode()
    store.set(backend._key, unsealed)
    assert backend.get_state() is None


WORKER = """
import os, sys, time, torch
import libddp.distributed as dist
folder = sys.argv[1]
dist.init_process_group("gloo")
open(os.path.join(folder, "ready" + os.environ["RANK"]), "w").write(os.environ["MASTER_ADDR"])
end = time.monotonic() + 90
while not os.path.exists(os.path.join(folder, "go")):
    assert time.monotonic() < end
    time.sleep(0.05)
t = torch.ones(1); dist.all_reduce(t)
assert t.item() == 2
dist.destroy_process_group()
"""


def listening(pid: int) -> dict[int, str]:
    """Ports that a process listens at, and the address as /proc writes it."""
    own = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                address, port = row[1].split(":")
                found[int(port, 16)] = address
    return found


def wait_until(condition, agents) -> None:
    end = time.monotonic() + 90
    while not condition():
        for agent in agents:
            assert agent.poll() is None, Path(agent.log).read_text()
        assert time.monotonic() < end, [Path(agent.log).read_text() for agent in agents]
        time.sleep(0.1)


@contextlib.contextmanager
def launchers(folder, *command_lines):
    (folder / "job.py").write_text(WORKER)
    agents = []
    try:
        for number, options in enumerate(command_lines):
            log = folder / f"agent{number}"
            command = ["-m", "libddp", "run", "--preload", *options, "job.py", str(folder)]
            agents.append(ForkedProgram(command, folder, os.environ, log, forks_server=True))
            agents[-1].log = log
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
        for agent in agents:
            try:
                agent.wait(60)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def attack(folder, agents, port) -> None:
    """Writes into every entry that launchers read, until one of them says so."""
    stranger = client(port)
    logs = [Path(agent.log) for agent in agents]

    def is_noticed():
        for name in stranger.list_keys():
            name = name.removeprefix("/")
            if name.startswith("torch.rendezvous.") and "/" not in name:
                stranger.set(name, evil(folder / "ran"))
        return (folder / "ran").exists() or any(
            "event=rendezvous_entry_refused" in log.read_text() for log in logs
        )

    wait_until(is_noticed, agents)


def end_well(folder, agents) -> None:
    (folder / "go").touch()
    for agent in agents:
        assert agent.wait(90) == 0, Path(agent.log).read_text()
    assert not (folder / "ran").exists()


def are_ready(folder):
    return all((folder / f"ready{rank}").exists() for rank in range(2))


def test_one_host_listens_at_loopback_only_and_runs_nothing_of_a_stranger(tmp_path):
    with launchers(tmp_path, ["--nproc-per-node=2"]) as agents:
        wait_until(lambda: are_ready(tmp_path), agents)
        ports = listening(agents[0].pid)
        assert ports
        assert set(ports.values()) == {"0100007F"}
        assert (tmp_path / "ready0").read_text() == "127.0.0.1"
        for port in ports:
            if any("rendezvous" in name for name in client(port).list_keys()):
                attack(tmp_path, agents, port)
        end_well(tmp_path, agents)


@pytest.mark.parametrize(
    "options",
    [
        ["--master-port={port}"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"],
        ["--standalone"],
    ],
)
def test_one_host_by_other_options_listens_at_loopback_only(tmp_path, options):
    probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    options = ["--nproc-per-node=2", *(option.format(port=port) for option in options)]
    with launchers(tmp_path, options) as agents:
        wait_until(lambda: are_ready(tmp_path), agents)
        assert set(listening(agents[0].pid).values()) == {"0100007F"}
        end_well(tmp_path, agents)


@pytest.mark.parametrize("has_key", [True, False])
def test_launchers_of_several_hosts_run_nothing_of_a_stranger(tmp_path, has_key):
    probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    if has_key:
        key = tmp_path / "run.key"
        key.write_bytes(os.urandom(40) + b"x")
        key.chmod(0o600)
        options.append(f"--run-key-file={key}")
    with launchers(tmp_path, options, options) as agents:
        wait_until(lambda: are_ready(tmp_path), agents)
        attack(tmp_path, agents, port)
        end_well(tmp_path, agents)
