"""What ranks do while something is done to them."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as torch_dist


def keep_store(me) -> None:
    """Hosts the store of all runs, as an agent does; the driver ends it."""
    server = torch_dist.TCPStore(me.store[0], me.store[1], is_master=True, wait_for_workers=False)
    (me.folder / "port").write_text(str(server.port))
    me.mark("open")
    time.sleep(1 << 20)


def everything(dist, rank: int, world: int, ordinary, arena) -> None:
    """One round of all kinds of collectives, small and large."""
    small = torch.ones(8)
    dist.all_reduce(small)
    dist.all_reduce(ordinary)
    dist.all_reduce(arena)
    gathered = torch.empty(world * 1000)
    dist.all_gather_into_tensor(gathered, torch.ones(1000))
    dist.reduce_scatter_tensor(torch.empty(1000), gathered)
    dist.broadcast(ordinary, src=world - 1)
    works = [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    got = torch.empty(5000)
    works = [
        dist.irecv(got, (rank - 1) % world),
        dist.isend(torch.ones(5000), (rank + 1) % world),
    ]
    for work in works:
        work.wait()
    dist.barrier()


def forever(me, dist):
    """`everything` until it fails, as a function to call."""
    arena = dist.native().allocate([1 << 18])
    arena.zero_()
    ordinary = torch.zeros(1 << 18)

    def loop():
        while True:
            everything(dist, me.rank, me.world_size, ordinary, arena)

    return loop


def join(me, timeout_s: float = 120.0):
    """The default group, tried once, so that its threads run."""
    import libddp.distributed as dist

    me.join(timeout_s)
    dist.all_reduce(torch.ones(1))
    return dist


def loop(me) -> dict:
    """Works until the group fails; says of what and when. A second call must tell it again."""
    dist = join(me)
    body = forever(me, dist)
    me.mark("ready")
    learned = me.learn(body)
    again = me.learn(lambda: dist.all_reduce(torch.ones(1)))
    assert again["type"] is not None, "the group goes on after it has failed"
    learned["again_s"] = again["at"] - again["began"]
    dist.destroy_process_group()
    return learned


def idle(me) -> dict:
    """Calls nothing until the group has failed by itself; says of what and when."""
    dist = join(me)
    group = dist.native()
    me.mark("ready")

    def wait():
        while not group.has_failed():
            time.sleep(0.002)
        group.check()

    learned = me.learn(wait)
    dist.destroy_process_group()
    return learned


def work_until_told(me) -> dict:
    """Works until the driver says stop, agreed by all; the longest step."""
    dist = join(me)
    arena = dist.native().allocate([1 << 18])
    arena.zero_()
    ordinary = torch.zeros(1 << 18)
    me.mark("ready")
    longest_s, num_steps = 0.0, 0
    stop = torch.zeros(1)
    while not stop.item():
        start = time.monotonic()
        everything(dist, me.rank, me.world_size, ordinary, arena)
        stop.fill_((me.folder / "stop").exists())
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        longest_s = max(longest_s, time.monotonic() - start)
        num_steps += 1
    dist.destroy_process_group()
    return {"longest_s": longest_s, "num_steps": num_steps}


def loop_and_leave(me, victim: int, how: str) -> dict:
    """One rank ends after a few rounds, without a word to the others."""
    dist = join(me)
    body = forever(me, dist)
    if me.rank == victim:
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        (me.folder / "left").write_text(str(time.monotonic()))
        if how == "_exit":
            os._exit(3)
        sys.exit(3)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    learned = me.learn(body)
    dist.destroy_process_group()
    return learned
