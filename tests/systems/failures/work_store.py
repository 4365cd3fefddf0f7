"""What ranks do while the store, or the rank that hosts it, is taken away from them."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as torch_dist

from failures.work import everything


def host_store(me) -> None:
    """As the agent of a launcher: the store's host is no rank."""
    server = torch_dist.TCPStore(me.store[0], 0, is_master=True, wait_for_workers=False)
    (me.folder / "port").write_text(str(server.port))
    me.mark("open")
    time.sleep(1 << 20)


def work_without_store(me, port: int) -> dict:
    """Works on while the store dies; then what a new group learns of it."""
    import libddp.distributed as dist

    me.store = (me.store[0], port)
    me.join(timeout_s=20)
    arena = dist.native().allocate([1 << 18])
    arena.zero_()
    ordinary = torch.zeros(1 << 18)
    me.mark("ready")
    stop, longest_s = torch.zeros(1), 0.0
    while not stop.item():
        start = time.monotonic()
        everything(dist, me.rank, me.world_size, ordinary, arena)
        stop.fill_((me.folder / "stop").exists())
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        longest_s = max(longest_s, time.monotonic() - start)
    learned = me.learn(lambda: dist.new_group())
    after = torch.ones(1)
    dist.all_reduce(after)
    assert after.item() == me.world_size
    dist.destroy_process_group()
    return {"longest_s": longest_s, "new_group": learned}


def use_environment(me) -> dict:
    """Rank 0 hosts the store, as with env:// and no agent; works until something fails."""
    import libddp.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    me.mark("ready")
    arena = dist.native().allocate([1 << 16])
    arena.zero_()
    ordinary = torch.zeros(1 << 16)

    def loop():
        while True:
            everything(dist, me.rank, me.world_size, ordinary, arena)

    learned = me.learn(loop)
    dist.destroy_process_group()
    return learned


def join_by_environment(me) -> dict:
    """What init_process_group says to the environment that the driver has set."""
    import libddp.distributed as dist

    me.mark("ready")
    return me.learn(lambda: dist.init_process_group("gloo", timeout=timedelta(seconds=20)))


def wait_for_others(me) -> dict:
    """Joins; the last rank never does: it is killed, or the store is."""
    me.mark("ready")
    if me.rank == me.world_size - 1:
        time.sleep(1 << 20)
    return me.learn(lambda: me.join(timeout_s=60))


def die_while_joining(me) -> dict:
    """The last rank publishes its description and is gone before the others have met it."""
    if me.rank == me.world_size - 1:
        me.mark("ready")
        me.join(timeout_s=60)
        return {}
    me.mark("ready")
    if me.rank == 0:
        me.wait_for("killed")  # until then the bootstrap cannot end
    return me.learn(lambda: me.join(timeout_s=60))


def forget(names) -> None:
    for name in names:
        os.environ.pop(name, None)


def join_without(me, name: str) -> dict:
    forget([name])
    return join_by_environment(me)
