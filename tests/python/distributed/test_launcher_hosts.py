"""What `libddp run` decides about hosts, without any: flags, pairs, slow hosts, rendezvous."""

import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from libddp._torch_patches import agent_hooks, rendezvous_delays, rendezvous_exit
from libddp._torch_patches.replacing import LAUNCHER
from libddp.errors import ArgumentError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from libddp import _hosts, _network_check, _rendezvous, run


def facts(matmul=0.01, links=(100.0,)):
    speeds = dict(enumerate(links))
    return {"matmul_s": matmul, "all_reduce_s": 0.1, "links_mb_s": speeds, "host": "h"}


@pytest.mark.parametrize(
    ("everyone", "slow"),
    [
        ([facts(), facts(0.011), facts(0.019)], {}),
        ([facts(), facts(), facts(0.05)], {2: "matmul 50.0 ms, median 10.0 ms"}),
        ([facts(), facts(0.05)], {1: "matmul 50.0 ms, median 10.0 ms"}),
        ([facts()], {}),
        (
            [facts(links=(90, 9)), facts(links=(90, 8)), facts(links=(9, 8))],
            {2: "network 9 MB/s at best, median 90 MB/s"},
        ),
        (
            [facts(), facts(), facts(0.05, (1,))],
            {2: "matmul 50.0 ms, median 10.0 ms; network 1 MB/s at best, median 100 MB/s"},
        ),
    ],
)
def test_a_slow_host_is_one_that_is_far_from_the_median(everyone, slow):
    assert _hosts.judge(everyone) == slow


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 8])
def test_each_host_meets_each_other_once_and_one_at_a_time(hosts):
    rounds = _network_check.rounds(hosts)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_dlrovers_flags_say_what_libddp_does_instead(capsys):
    flags = ["--auto_tunning", "--accelerator=nvidia.com/gpu", "--training_port=60000"]
    args = run.parse([*flags, "--save_at_breakpoint", "--ucp_device_type", "cpu", "train.py", "-x"])
    assert (args.training_script, args.training_script_args) == ("train.py", ["-x"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("libddp run: --") and " has no effect: " in line for line in lines)
    assert not args.network_check
    run.parse(["train.py"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--network-check", "--comm_perf_test", "--precheck=1"])
def test_flags_that_ask_for_the_check(flag):
    assert run.parse([flag, "train.py"]).network_check


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nnodes=1:4", "--node_unit=2"], "--node_unit=2 must divide both ends of --nnodes=1:4"),
        (["--nnodes=4", "--node_unit=0"], "--node_unit=0 must divide"),
        (["--exclude-straggler"], "Hint: add --network-check"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, told):
    with pytest.raises(ArgumentError, match=told):
        run.parse([*flags, "train.py"])


class Handler:
    """A rendezvous whose meetings are given."""

    def __init__(self, meetings, waiting=(), closed=False):
        self.meetings, self.waiting, self.closed = list(meetings), list(waiting), closed

    def next_rendezvous(self):
        rank, world_size = self.meetings.pop(0)
        return RendezvousInfo("store", rank, world_size, "where")

    def num_nodes_waiting(self):
        found = self.waiting.pop(0) if self.waiting else 0
        if isinstance(found, Exception):
            raise found
        return found

    def is_closed(self):
        return self.closed


def meet(handler, unit):
    hosts = _hosts.Hosts(unit)
    info = hosts.meet(handler, handler.next_rendezvous)
    return info.rank, info.world_size, info.store, info.bootstrap_store_info


def test_whole_units_of_hosts_run(capsys):
    assert meet(Handler([(1, 4)]), 2) == (1, 4, "store", "where")
    assert meet(Handler([(1, 5)]), 2) == (1, 4, "store", "where")
    assert not capsys.readouterr().err


def test_a_host_too_many_waits_until_others_come():
    handler = Handler([(2, 3), (2, 4)], waiting=[1])
    assert meet(handler, 2) == (2, 4, "store", "where")


def test_running_hosts_are_not_disturbed_for_less_than_a_unit():
    handler = Handler([(0, 2)], waiting=[1, 2])
    meet(handler, 2)
    assert [handler.num_nodes_waiting() for _ in range(3)] == [0, 2, 0]
    handler = Handler([(0, 3)], waiting=[1])  # with the spare it makes a unit
    meet(handler, 2)
    assert handler.num_nodes_waiting() == 1


@pytest.mark.parametrize("end", [{"closed": True}, {"waiting": [RendezvousConnectionError()]}])
def test_a_spare_ends_with_the_run(end, capsys):
    with pytest.raises(_hosts.SpareEnded):
        meet(Handler([(2, 3)], **end), 2)
    assert "this host is a spare: 3 hosts are there, and --node_unit=2 lets 2 run" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("", "keep_alive_interval=1,keep_alive_max_attempt=4"),
        ("is_host=1", "is_host=1,keep_alive_interval=1,keep_alive_max_attempt=4"),
        ("keep_alive_interval=7", "keep_alive_interval=7,keep_alive_max_attempt=4"),
    ],
)
def test_a_dead_launcher_is_noticed_as_soon_as_its_ranks(given, used):
    assert _rendezvous.with_defaults(given) == used


def test_few_hosts_look_at_each_other_more_often():
    delays = {hosts: rendezvous_delays.share(hosts) for hosts in (1, 2, 50, 100, 4000)}
    assert delays == {1: 0.1, 2: 0.1, 50: 0.5, 100: 1.0, 4000: 1.0}


def test_recorded_events_are_named_as_torch_names_them():
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    names = LAUNCHER.torchs(dynamic_rendezvous.get_method_name)

    def record():
        return names(), rendezvous_delays.method_name()

    def meet():
        return record()

    assert meet() == ("meet", "meet")
    assert rendezvous_delays.method_name(10**6) == names(10**6) == "no_method_name"


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_the_end_of_a_worker_is_seen_at_once(monkeypatch, has_pidfds):
    """Of any one, and also of one that somebody has waited for."""
    if not has_pidfds:
        monkeypatch.delattr(os, "pidfd_open")
    short, long = (subprocess.Popen(["sleep", seconds]) for seconds in ("0.2", "600"))
    try:
        assert agent_hooks._await_end([long.pid], 0.05) == []
        assert agent_hooks._await_end([long.pid, short.pid], 300) == [short.pid]
        assert agent_hooks._await_end([long.pid, short.pid], 300) == [short.pid]
        short.wait()
        assert agent_hooks._await_end([long.pid, short.pid], 300) == [short.pid]
    finally:
        long.kill()
        long.wait()
    assert agent_hooks._await_end([], 0.01) == []


def test_the_last_call_is_short_after_the_first_meeting():
    backend = SimpleNamespace(number=0)
    backend.round = lambda: backend.number
    timeout = dynamic.RendezvousTimeout()
    handler = SimpleNamespace(settings=SimpleNamespace(timeout=timeout))
    _rendezvous.shorten_last_call(handler, backend, 0.5)
    assert timeout.last_call == timedelta(seconds=30)
    backend.number = 1
    assert timeout.last_call == timedelta(seconds=0.5)
    assert timeout.join == timedelta(seconds=600)


def handlers_of(num_hosts, run_id, hosts, last_call=3.0, backend=C10dRendezvousBackend):
    """As launchers have them; `hosts`: least and most. Signs of life are missed after an hour."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    for _ in range(num_hosts - 1):
        stores.append(dist.TCPStore("127.0.0.1", stores[0].port, wait_for_workers=False))
    return [
        dynamic.DynamicRendezvousHandler.from_backend(
            run_id,
            store,
            backend(store, run_id),
            *hosts,
            local_addr="localhost",
            timeout=dynamic.RendezvousTimeout(last_call=timedelta(seconds=last_call)),
            keep_alive_interval=1200,
        )
        for store in stores
    ]


def handlers_of_two(run_id):
    return handlers_of(2, run_id, (1, 2))


def test_a_host_that_looks_seldom_is_in_the_next_meeting_all_the_same(monkeypatch):
    """Two have met, another one waits, and does not look again until the last call is long over."""
    one, other, late = handlers_of(3, "late", (2, 4), 0.3, _rendezvous.Backend)
    looks, waits, delay = threading.Event(), threading.Event(), dynamic._delay

    def delay_of_the_late(seconds):
        if threading.current_thread().name.startswith("late") and waits.is_set():
            assert looks.wait(120)
        delay(0.01)

    for handler in (one, other, late):
        handler._state_holder._cache_duration = 0.1  # as create_handler
    monkeypatch.setattr(dynamic, "_delay", delay_of_the_late)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # which newcomers wait for
    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(1, "late") as late_ones:
        meetings = [pool.submit(handler.next_rendezvous) for handler in (one, other)]
        assert {meeting.result(120).world_size for meeting in meetings} == {2}
        meetings = [late_ones.submit(late.next_rendezvous)]
        limit = time.monotonic() + 60
        while not one.num_nodes_waiting():
            assert time.monotonic() < limit
            time.sleep(0.01)
        waits.set()
        meetings += [pool.submit(handler.next_rendezvous) for handler in (one, other)]
        time.sleep(2)
        assert not any(meeting.done() for meeting in meetings)
        looks.set()
        assert [meeting.result(120).world_size for meeting in meetings] == [3] * 3
    one.shutdown()


def test_a_host_that_leaves_is_not_waited_for():
    one, other = handlers_of_two("leaving")
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(handler.next_rendezvous) for handler in (one, other)]
        assert {meeting.result(120).world_size for meeting in meetings} == {2}
        assert rendezvous_exit.leave(other)
        assert rendezvous_exit.leave(other)  # it is not there, as it should be
        assert pool.submit(one.next_rendezvous).result(120).world_size == 1
    one.shutdown()
    assert not rendezvous_exit.leave(Handler([]))


def test_leaving_a_run_whose_store_is_gone_ends():
    one, other = handlers_of_two("gone")
    with ThreadPoolExecutor(2) as pool:
        for meeting in [pool.submit(handler.next_rendezvous) for handler in (one, other)]:
            meeting.result(120)

    def refuse(*_):
        raise RendezvousConnectionError("no store")

    backend = other._state_holder._backend
    backend.get_state = backend.set_state = refuse
    assert not rendezvous_exit.leave(other)
    one.shutdown()


def test_a_run_on_one_host_meets_once_and_numbers_each_start(monkeypatch):
    monkeypatch.setattr(_rendezvous, "_numbers", [])
    server = _rendezvous.loopback_server(0)
    parameters = RendezvousParameters(
        _rendezvous.LOCAL_NAME, f"127.0.0.1:{server.port}", "alone", 1, 1, local_addr="127.0.0.1"
    )
    handler = _rendezvous.create_local_handler(parameters)
    infos = [handler.next_rendezvous() for _ in range(3)]
    rounds = handler._state_holder.state.round
    assert len(set(_rendezvous._numbers)) == 3
    for info in infos:
        assert (info.rank, info.world_size) == (0, 1)
        workers = dist.TCPStore("127.0.0.1", info.bootstrap_store_info.master_port)
        for store in (info.store, workers):
            assert not store.check(["key"]), "each start has keys of its own"
            store.set("key", "")
    assert rounds == _rendezvous._numbers[0], "torch's handler has met once"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler.next_rendezvous()
    assert handler._state_holder.state.round == rounds + 1
    handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_a_failure_because_of_a_host_that_left_is_excused_once(capsys):
    handler = Handler([(0, 2), (0, 1)], waiting=[0])
    handler.departures = SimpleNamespace(has_any=lambda: handler.meetings == [(0, 1)])
    hosts = _hosts.Hosts()
    assert not hosts.excuse(), "nobody has met"
    hosts.meet(handler, handler.next_rendezvous)
    assert handler.num_nodes_waiting() == 0
    assert hosts.excuse()
    assert hosts.excuse()
    assert handler.num_nodes_waiting() == 1, "torch's agent would not start them again"
    assert capsys.readouterr().err.count("another host has left the run") == 1
    hosts.meet(handler, handler.next_rendezvous)
    assert not hosts.excuse()
    assert handler.num_nodes_waiting() == 0


def test_a_store_that_does_not_answer_holds_no_end_up(monkeypatch):
    """Also one that never answers; the thread ends with the process."""
    monkeypatch.setattr(_hosts, "LEAVE_SECONDS", 0.05)
    is_over, handler = threading.Event(), Handler([(0, 1)])
    handler.departures = SimpleNamespace(tell=lambda: is_over.wait(60))
    hosts = _hosts.Hosts()
    hosts.leave()  # nobody has met
    hosts.meet(handler, handler.next_rendezvous)
    begin = time.monotonic()
    hosts.leave()
    hosts.leave()
    assert time.monotonic() - begin < 30
    is_over.set()
