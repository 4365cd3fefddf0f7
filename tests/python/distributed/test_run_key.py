"""The run key of `libddp run`: where it comes from, who gets it, and that nothing shows it."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ranks
from libddp.errors import ArgumentError
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from libddp import _run_key


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(subprocess_handler, "Popen", subprocess.Popen)  # what a test sets is undone
    for name in (_run_key.FILE, _run_key.DESCRIPTOR):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def arguments(nnodes="1", run_key_file=None):
    return SimpleNamespace(nnodes=nnodes, run_key_file=run_key_file)


def test_one_host_gets_a_random_key(environment):
    _run_key.hand_out(arguments())
    path = os.environ[_run_key.FILE]
    assert path.startswith(f"/proc/{os.getpid()}/fd/")
    facts = os.stat(path)
    assert (facts.st_size, facts.st_mode & 0o777) == (64, 0o600)
    with open(path, "rb") as file:
        first = file.read()
    assert len(set(first)) > 8
    with pytest.raises(OSError):  # sealed
        os.pwrite(int(path.rsplit("/", 1)[1]), b"x", 0)
    assert not os.get_inheritable(int(path.rsplit("/", 1)[1]))
    with open(_run_key.path_of(_run_key.make()), "rb") as file:
        assert file.read() != first


def test_no_random_key_is_too_short_without_its_line_ends(environment):
    for _ in range(2000):  # one in 128 ends with what the library takes for a line end
        descriptor = _run_key.make()
        key = os.pread(descriptor, 100, 0)
        os.close(descriptor)
        assert len(key.rstrip(b"\r\n")) >= 32


def test_several_hosts_get_none_that_nobody_gave(environment):
    _run_key.hand_out(arguments(nnodes="2"))
    assert _run_key.FILE not in os.environ


def test_a_key_that_is_given_stays(environment, tmp_path, monkeypatch):
    monkeypatch.setenv(_run_key.FILE, "/some/file")
    _run_key.hand_out(arguments())
    assert os.environ[_run_key.FILE] == "/some/file"


def a_memory_file(key):
    """As memfd_create leaves it: everybody may write."""
    descriptor = os.memfd_create("key")
    os.write(descriptor, key)  # and it stands at its end
    return descriptor


def a_pipe(key):
    reading, writing = os.pipe()
    os.write(writing, key)
    os.close(writing)
    return reading


@pytest.mark.parametrize("make", [a_memory_file, a_pipe])
def test_a_key_from_a_descriptor_is_copied_for_all_workers(environment, monkeypatch, make):
    key = os.urandom(40) + b"x"
    monkeypatch.setenv(_run_key.DESCRIPTOR, str(make(key)))
    _run_key.hand_out(arguments(nnodes="2"))
    assert _run_key.DESCRIPTOR not in os.environ
    path = os.environ[_run_key.FILE]
    assert path.startswith(f"/proc/{os.getpid()}/fd/")
    assert os.stat(path).st_mode & 0o777 == 0o600
    for _ in range(2):
        with open(path, "rb") as file:
            assert file.read() == key


def test_a_descriptor_that_cannot_be_a_key_is_refused(environment, monkeypatch):
    def refused(descriptor, match):
        monkeypatch.setenv(_run_key.DESCRIPTOR, str(descriptor))
        with pytest.raises(ArgumentError, match=match):
            _run_key.hand_out(arguments())

    refused(1000000, r"LIBDDP_RUN_KEY_FD=1000000: .*must pass the descriptor on")
    refused("three", r"LIBDDP_RUN_KEY_FD=three: ")
    refused(a_pipe(b"short"), r"it has 5 bytes, a key has 32 to 2048")
    refused(a_memory_file(bytes(4000)), r"it has more bytes")
    reading, writing = os.pipe()
    os.write(writing, bytes(40))
    refused(reading, r"its other end is neither closed nor written to")
    os.close(writing)


def test_a_file_that_cannot_be_a_key_is_refused_before_anything_starts(environment, tmp_path):
    path = tmp_path / "run.key"
    with pytest.raises(ArgumentError, match=r"--run-key-file=.*No such file.*openssl rand"):
        _run_key.hand_out(arguments(run_key_file=str(path)))
    path.write_bytes(os.urandom(32) + b"x")  # a newline at the end would not count
    path.chmod(0o644)
    with pytest.raises(ArgumentError, match="its mode is 0644, so others can use it"):
        _run_key.hand_out(arguments(run_key_file=str(path)))
    path.chmod(0o600)
    _run_key.hand_out(arguments(nnodes="2", run_key_file=str(path)))
    assert os.environ[_run_key.FILE] == str(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_root_may_be_read_by_its_group(environment, tmp_path):
    path = tmp_path / "run.key"
    path.write_bytes(os.urandom(32) + b"x")  # a newline at the end would not count
    for mode in (0o640, 0o440, 0o400):
        path.chmod(mode)
        _run_key.hand_out(arguments(run_key_file=str(path)))
    for mode in (0o660, 0o444, 0o641):
        path.chmod(mode)
        with pytest.raises(ArgumentError, match=f"0{mode:o}, so others can use it.*fsGroup"):
            _run_key.hand_out(arguments(run_key_file=str(path)))
    path.chmod(0o440)
    os.chown(path, 12345, 12345)
    with pytest.raises(ArgumentError, match=r"it belongs to user 12345.*or to root with mode 0640"):
        _run_key.hand_out(arguments(run_key_file=str(path)))


SCRIPT = """
import os, sys, torch
import libddp.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1); dist.all_reduce(t)
with open(os.environ["LIBDDP_RUN_KEY_FILE"], "rb") as file:
    key = file.read()
agent = os.environ["LIBDDP_RUN_KEY_FILE"].split("/")[2]
for pid in (agent, "self"):
    for name in ("environ", "cmdline"):
        with open(f"/proc/{pid}/{name}", "rb") as file:
            shown = file.read()
        assert key not in shown and key.hex().encode() not in shown
open_files = []
for entry in os.listdir("/proc/self/fd"):
    try:
        open_files.append(os.readlink(f"/proc/self/fd/{entry}"))
    except OSError:
        pass
assert not [name for name in open_files if "libddp-run-key" in name], open_files
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(f"{t.item()} {key.hex()}")
dist.destroy_process_group()
"""


def test_the_workers_of_libddp_run_share_a_key_that_nothing_shows(environment, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "libddp", "run", "--nproc-per-node=2", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LIBDDP_LOG_LEVEL": "DEBUG"},
    )
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / rank).read_text().split() for rank in "01"]
    assert told[0] == told[1]
    assert told[0][0] == "2.0"
    assert told[0][1] not in done.stdout + done.stderr


NAMESPACE_SCRIPT = """
import os, sys, torch
import libddp.distributed as dist
assert not os.path.exists(os.environ["LIBDDP_RUN_KEY_FILE"])
dist.init_process_group("gloo", require_key=True)
t = torch.ones(1); dist.all_reduce(t)
assert t.item() == 2
dist.destroy_process_group()
print("joined", flush=True)
"""
OWN_PROCESS_IDS = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_unshare() -> bool:
    try:
        return subprocess.run([*OWN_PROCESS_IDS, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_unshare(), reason="no namespaces here")
@pytest.mark.parametrize("make", [None, a_memory_file, a_pipe])
def test_workers_with_process_ids_of_their_own_have_the_key(environment, tmp_path, make):
    script = tmp_path / "job.py"
    script.write_text(NAMESPACE_SCRIPT)
    command = [sys.executable, "-m", "libddp", "run", "--nproc-per-node=2", "--no-python"]
    command += [*OWN_PROCESS_IDS, sys.executable, str(script)]
    given = [make(os.urandom(40) + b"x")] if make else []
    variables = {_run_key.DESCRIPTOR: str(given[0])} if given else {}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        pass_fds=given,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("joined") == 2


def join_with(path):
    import libddp.distributed as dist

    os.environ["LIBDDP_RUN_KEY_FILE"] = path
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])  # the key was read once
    dist.barrier(group)


def test_a_key_in_the_environment_of_any_launcher(tmp_path):
    path = tmp_path / "run.key"
    path.write_bytes(os.urandom(40) + b"x")
    path.chmod(0o600)
    ranks.run(join_with, 2, str(path))
    path.chmod(0o644)
    for outcome in ranks.launch(join_with, 2, str(path)):
        assert outcome.error == "ArgumentError"
        assert f"run key from file {path}: its mode is 0644" in outcome.message


def join_where_a_key_is_required():
    import libddp.distributed as dist

    dist.init_process_group("gloo", require_key=True)
    assert "LIBDDP_REQUIRE_KEY" not in os.environ


def test_require_key_asks_nothing_of_one_host():
    ranks.run(join_where_a_key_is_required, 2)


def listen_for(init_method):
    """Joins over a store of rank 0; the addresses that this process listens on."""
    import libddp.distributed as dist
    import torch

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the one that listed them
            continue
    rows = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            rows += [line.split() for line in list(lines)[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.barrier()
    dist.destroy_process_group()
    return listening


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_store_of_rank_0_listens_where_the_others_look_for_it(host):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outcomes = ranks.launch(listen_for, 2, f"tcp://{host}:{port}", env={"LIBDDP_LOG_LEVEL": "INFO"})
    assert not any(outcome.failed for outcome in outcomes), outcomes
    at_loopback = [f"0100007F:{port:04X}"]
    everywhere = [f"{'0' * 32}:{port:04X}"]
    is_told = "event=store_on_all_interfaces" in outcomes[0].output
    if host == "0.0.0.0":
        assert outcomes[0].value in (everywhere, [f"00000000:{port:04X}"])
        assert is_told
        assert "it means all of them" in outcomes[0].output
    else:
        assert outcomes[0].value == at_loopback
        assert not is_told
    assert outcomes[1].value == []
