"""Groups one after the other at one address, whose stores end with rank 0."""

import os
import socket
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from libddp.errors import TimeoutError

from libddp import distributed as ddp_dist


@pytest.fixture
def port():
    """Nobody listens there, and nobody else is given it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def join(port, **arguments):
    ddp_dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        **arguments,
    )


def use(number):
    tensor = torch.full((5,), number + float(dist.get_rank()))
    ddp_dist.all_reduce(tensor)
    world_size = dist.get_world_size()
    assert tensor[0] == world_size * number + world_size * (world_size - 1) / 2
    # Its parts are found through the store, too.
    part = ddp_dist.new_group([0, world_size - 1])
    if dist.get_rank() in (0, world_size - 1):
        ddp_dist.barrier(group=part)


def come_back(port, slow):
    """Rank `slow` leaves each group after the others."""
    for number in range(12):
        join(port)
        use(number)
        if int(os.environ["RANK"]) == slow:
            time.sleep(0.02 * (number % 3))
        ddp_dist.destroy_process_group()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_and_come_back(port, world_size, slow):
    ranks.run(come_back, world_size, port, slow)


def come_back_alone(port):
    join(port)
    use(1)
    if dist.get_rank() == 0:
        time.sleep(3.0)
        return
    ddp_dist.destroy_process_group()
    began = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r", rank 1 is still that of the group which .* has left"
    ):
        join(port, timeout=timedelta(seconds=1))
    assert time.monotonic() - began < 2.5


def test_a_rank_that_comes_back_alone_is_told(port):
    ranks.run(come_back_alone, 2, port)


def meet_at_a_store_of_the_script(port):
    for number in range(3):
        if os.environ["RANK"] == "1":
            join(port)
        else:
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            ddp_dist.init_process_group("gloo", store=store, rank=0, world_size=2)
        use(number)
        # Nothing tells such a store from the one before: rank 1 comes back last.
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
        ddp_dist.destroy_process_group()
        store = None


def test_a_store_of_the_script_is_taken_as_it_is(port):
    ranks.run(meet_at_a_store_of_the_script, 2, port)
