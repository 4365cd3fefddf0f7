"""`libddp run --nnodes=MIN:MAX`: the host of the launchers' store is gone, and the run goes on."""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest
from network import Network
from run_keys import key_file
from test_hosts_elastic import IN_PLACE_JOB, JOB, Hosts

MODES = pytest.mark.parametrize("in_place", [False, True], ids=["agent", "in_place"])
MOVED = r"store at (\S+) is gone; the run goes on with the store at (\S+)\. A host that joins"
CUT_OFF = "of the last meeting were found: it takes more than half"
FIRST_STORE = "10.77.0.1:29400"


def kill(hosts, host: int) -> None:
    """All of its processes, as when the power goes."""
    listed = subprocess.run(
        ["ip", "netns", "pids", hosts.net.hosts[host]], capture_output=True, text=True, timeout=30
    )
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    hosts.launchers.pop(host).wait(30)


def lose_the_store(hosts, host: int, is_cut: bool, left: int) -> str:
    """The store's host is gone, and that many go on; where their store is."""
    if is_cut:
        hosts.net.cut(host)
    kill(hosts, host)
    lost = time.monotonic()
    hosts.until(lambda: world(hosts) == left, 60)
    print(f"the store's host lost to the next start: {hosts.starts()[-1][0] - lost:.1f} s")
    (place,) = {moves(hosts, other)[-1][1] for other in hosts.launchers}
    return place


def moves(hosts, host: int) -> list[tuple[str, str]]:
    """What a launcher has said of them: from where to where."""
    return re.findall(MOVED, hosts.said(host))


def world(hosts) -> int:
    """Of the newest start."""
    return hosts.starts()[-1][1] if hosts.starts() else 0


def ends_well(hosts) -> None:
    known = sorted(hosts.launchers)
    assert hosts.go(known) == [0] * len(known), "\n".join(hosts.said(h)[-3000:] for h in known)


@contextlib.contextmanager
def running(num_hosts: int, folder, in_place: bool, *flags, job=None):
    """Hosts whose ranks have met; with a run key."""
    flags = [*flags, "--preload", *["--in-place"] * in_place]
    flags.append(f"--run-key-file={key_file(folder)}")
    job = job or (IN_PLACE_JOB if in_place else JOB)
    with Network(num_hosts) as net, Hosts(net, folder, *flags, job=job) as hosts:
        for host in range(num_hosts):
            hosts.start(host)
        hosts.until(lambda: world(hosts) == num_hosts)
        time.sleep(1)
        yield hosts


@MODES
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "killed"])
def test_the_run_goes_on_without_the_host_of_the_store(tmp_path, in_place, is_cut):
    with running(3, tmp_path, in_place, "--nnodes=1:3", "--max-restarts=5") as hosts:
        place = lose_the_store(hosts, 0, is_cut, left=2)
        assert place.startswith("10.77.0.2:"), place
        for host in (1, 2):
            assert moves(hosts, host) == [(FIRST_STORE, place)], hosts.said(host)
        ends_well(hosts)


def test_it_moves_again_and_a_host_joins_at_the_new_store(tmp_path):
    with running(4, tmp_path, True, "--nnodes=2:4", "--max-restarts=5") as hosts:
        lose_the_store(hosts, 0, is_cut=False, left=3)
        place = lose_the_store(hosts, 1, is_cut=False, left=2)
        assert place.startswith("10.77.0.3:"), place
        hosts.flags += (f"--rdzv-endpoint={place}", "--rdzv-conf=is_host=0")
        hosts.start(0)
        hosts.until(lambda: world(hosts) == 3)
        ends_well(hosts)


@MODES
def test_a_launcher_that_starts_where_the_store_was_joins_the_run(tmp_path, in_place):
    """As a supervisor starts it: alone it would be enough for a second run."""
    with running(3, tmp_path, in_place, "--nnodes=1:3", "--max-restarts=5") as hosts:
        place = lose_the_store(hosts, 0, is_cut=False, left=2)
        hosts.start(0)
        hosts.until(lambda: world(hosts) == 3, 60)
        assert moves(hosts, 0) == [(FIRST_STORE, place)], hosts.said(0)
        # The next one with a store knows where it was first, too, and host 0 serves one there.
        next_place = lose_the_store(hosts, 1, is_cut=False, left=2)
        hosts.start(1)
        hosts.until(lambda: world(hosts) == 3, 60)
        assert moves(hosts, 1)[-1] == (FIRST_STORE, next_place), hosts.said(1)
        assert 1 not in {world for _, world in hosts.starts()}, "a second run"
        ends_well(hosts)


@pytest.mark.parametrize("in_place", [False], ids=["agent"])  # half a minute each
def test_of_two_hosts_none_goes_on_without_the_store(tmp_path, in_place):
    """It could be the other one that goes on."""
    with running(2, tmp_path, in_place, "--nnodes=1:2", "--max-restarts=5") as hosts:
        kill(hosts, 0)
        assert hosts.launchers[1].wait(90) not in (0, -signal.SIGKILL)
        said = hosts.said(1)
        told = f"store was at {FIRST_STORE}, and for 30 s too few of the 2 hosts {CUT_OFF}"
        assert told in said, said
        assert "Hint: where they do not, start again on hosts that live" in said
        assert "Traceback" not in said.partition("too few of the 2 hosts")[2], said
        assert not moves(hosts, 1)
        assert world(hosts) == 2


@MODES
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_the_host_of_the_store_leaves_and_that_is_no_failure(tmp_path, in_place, num_hosts):
    """By SIGTERM to its launcher; the others may not start again once."""
    flags = [f"--nnodes=1:{num_hosts}", "--max-restarts=0"]
    with running(num_hosts, tmp_path, in_place, *flags) as hosts:
        hosts.launchers[0].terminate()
        left = time.monotonic()
        hosts.until(lambda: world(hosts) == num_hosts - 1, 60)
        print(f"the store's host left to the next start: {hosts.starts()[-1][0] - left:.1f} s")
        assert hosts.launchers.pop(0).wait(60) == 128 + signal.SIGTERM
        for host in hosts.launchers:
            assert len(moves(hosts, host)) == 1, hosts.said(host)
        ends_well(hosts)


@pytest.mark.parametrize("in_place", [True], ids=["in_place"])  # half a minute each
def test_a_store_that_is_cut_off_goes_on_nowhere_else(tmp_path, in_place):
    """Its host lives: the two others go on, and it ends, although MIN is 1."""
    with running(3, tmp_path, in_place, "--nnodes=1:3", "--max-restarts=5") as hosts:
        hosts.net.cut(0)
        hosts.until(lambda: world(hosts) == 2, 60)
        lone = hosts.launchers.pop(0)
        assert lone.wait(90) not in (0, -signal.SIGKILL)
        assert "hosts of the last meeting are together there" in hosts.said(0), hosts.said(0)
        assert not moves(hosts, 0)
        assert {world for _, world in hosts.starts()} == {3, 2}, "it has trained alone"
        ends_well(hosts)


def test_a_host_that_was_away_for_a_moment_comes_back(tmp_path):
    with running(3, tmp_path, False, "--nnodes=1:3", "--max-restarts=5") as hosts:
        hosts.net.cut(2)
        hosts.until(lambda: world(hosts) == 2, 60)
        hosts.net.mend(2)
        hosts.until(lambda: world(hosts) == 3, 60)
        assert f"store at {FIRST_STORE} answers again" in hosts.said(2), hosts.said(2)
        assert not any(moves(hosts, host) for host in range(3))
        ends_well(hosts)


#: Rank 0, at the store, ends before the others; or fails.
UNEVEN_JOB = """
import os, sys, time
import libddp.distributed as dist

folder = sys.argv[1]
dist.init_process_group("libddp")
rank = dist.get_rank()
if rank == 0:
    with open(os.path.join(folder, "starts"), "a") as file:
        print(time.monotonic(), dist.get_world_size(), file=file)
end = time.monotonic() + 100
while not os.path.exists(os.path.join(folder, "go")) and time.monotonic() < end:
    time.sleep(0.02)
if rank == 0 and os.path.exists(os.path.join(folder, "fail")):
    raise ValueError("no such token")
dist.destroy_process_group()
time.sleep(2 * rank)
"""


@pytest.mark.parametrize("fails", [False, True], ids=["well", "failed"])
def test_a_run_that_ends_moves_nowhere(tmp_path, fails):
    with running(3, tmp_path, False, "--nnodes=1:3", job=UNEVEN_JOB) as hosts:
        if fails:
            (tmp_path / "fail").touch()
        (tmp_path / "go").touch()
        statuses = [hosts.launchers[host].wait(90) for host in range(3)]
        assert statuses[0] == int(fails), hosts.said(0)
        assert fails or statuses == [0, 0, 0], statuses
        for host in range(3):
            assert "looks for the others" not in hosts.said(host), hosts.said(host)
        assert len(hosts.starts()) == 1
