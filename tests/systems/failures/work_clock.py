"""Ranks whose wall clocks are an hour off, in both directions, and jump in the midst of a wait."""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta

import torch

from failures.work import everything, join

SHORT_S = 1.5


def skew(seconds: int) -> None:
    ctypes.CDLL(None).skew_wall_clock(ctypes.c_long(seconds))


def join_and_jump(me) -> dict:
    right = time.time() - time.monotonic()
    asked_s = (3600, -3600, 0)[me.rank]
    skew(asked_s)
    dist = join(me)
    skew_s = time.time() - time.monotonic() - right
    arena = dist.native().allocate([1 << 16])
    arena.zero_()
    for _ in range(20):
        everything(dist, me.rank, me.world_size, torch.ones(1000), arena)
    # Nobody answers: the receive must end after its timeout, while the clock jumps to and fro.
    jumps = [threading.Timer(0.3 * n, skew, ((-1) ** n * 86400,)) for n in range(1, 5)]
    for jump in jumps:
        jump.start()
    native = dist.native()
    learned = me.learn(
        lambda: native.recv(
            torch.ones(1), (me.rank + 1) % 3, tag=9, timeout=timedelta(seconds=SHORT_S)
        )
    )
    for jump in jumps:
        jump.join()
    # The first one that gives up ends the waits of all.
    assert learned["type"] in ("TimeoutError", "PeerError"), learned
    dist.destroy_process_group()
    return {
        "skew_s": skew_s,
        "asked_s": asked_s,
        "waited_s": learned["at"] - learned["began"],
    }
