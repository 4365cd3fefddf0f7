"""A rendezvous store, or a name server, that does not answer any more: nobody waits for it."""

import os
import time
from datetime import timedelta
from pathlib import Path

from host_ranks import launch
from network import Network

FOLDER = "RANKS_FOLDER"


def wait_for(paths, seconds=90) -> None:
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"waited too long for {paths}"
        time.sleep(0.02)


def join_without_the_last(seconds):
    """The last rank never comes; when the others give up, and with which words."""
    import libddp.distributed as dist

    folder, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
    (folder / f"joins-{rank}").touch()
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        wait_for([folder / "over"], 100)
        return None
    start = time.monotonic()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    except dist.DistError as error:
        return str(error), time.monotonic() - start


def test_a_cable_pulled_while_ranks_join():
    with Network(2) as net:

        def pull(folder):
            wait_for([folder / "joins-0", folder / "joins-1"])
            time.sleep(3)
            net.cut(1)
            wait_for([folder / "result-0", folder / "result-1"], 60)
            (folder / "over").touch()

        outcomes = launch(net, [0, 1, 1], join_without_the_last, 10, on_start=pull)
    for outcome in outcomes[:2]:
        assert not outcome.failed, outcome.output
    assert "rank 2 (never came)" in outcomes[0].value[0]
    message = outcomes[1].value[0]
    assert "the rendezvous store at 10.77.0.1:29500 did not answer" in message, message
    for outcome in outcomes[:2]:
        assert outcome.value[1] < 20, outcome.value


def make_a_group_without_a_network():
    import libddp.distributed as dist
    import torch

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    folder = Path(os.environ[FOLDER])
    (folder / f"ready-{dist.get_rank()}").touch()
    wait_for([folder / "cut"])
    start = time.monotonic()
    try:
        dist.new_group([0, 1], timeout=timedelta(seconds=80))
    except dist.DistError as error:
        return str(error), time.monotonic() - start


def test_a_cable_pulled_before_a_later_group():
    with Network(2) as net:

        def pull(folder):
            wait_for([folder / "ready-0", folder / "ready-1"])
            net.cut(1)
            (folder / "cut").touch()

        outcomes = launch(net, [0, 1], make_a_group_without_a_network, on_start=pull)
    for outcome in outcomes:
        assert not outcome.failed, outcome.output
        message, seconds = outcome.value
        assert "a group over the same store failed meanwhile" in message, message
        assert "no sign of life" in message, message
        assert seconds < 40, message  # the watchdog's five on an idle machine


def join_by_name():
    import libddp.distributed as dist

    start = time.monotonic()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    except dist.DistError as error:
        return str(error), time.monotonic() - start


def test_a_name_server_that_does_not_answer():
    with Network(2) as net, net.dead_name_server(1):
        names = {"MASTER_ADDR": "first-host.example.com"}
        outcomes = launch(net, [0, 1], join_by_name, env=lambda rank: names if rank == 1 else {})
    assert not outcomes[1].failed, outcomes[1].output
    message, seconds = outcomes[1].value
    assert "no name server has answered" in message, message
    assert seconds < 9, message  # the resolver itself takes ten and more
