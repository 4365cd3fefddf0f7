"""Ranks of which one calls something else than the others."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from failures.work import join

#: For calls that nobody answers.
SHORT_S = 1.5


def calls(dist, odd: bool) -> dict:
    """By kind: what this rank calls; `odd` is the one that deviates. Each is its group's call 2."""
    ones = torch.ones
    native = dist.native()
    large = 1 << 18
    last = dist.get_world_size() - 1
    return {
        "operation": lambda: dist.barrier() if odd else dist.all_reduce(ones(4)),
        "shape": lambda: dist.all_reduce(ones(5 if odd else 4)),
        "shape of a large tensor": lambda: dist.all_reduce(ones(large + odd)),
        "dtype of the same width": lambda: dist.all_reduce(
            ones(4, dtype=torch.int32 if odd else torch.float32)
        ),
        "dtype of another width": lambda: dist.all_reduce(
            ones(4, dtype=torch.float64 if odd else torch.float32)
        ),
        "reduce op": lambda: dist.all_reduce(
            ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        ),
        "root": lambda: dist.broadcast(ones(4), src=last if odd else 0),
        "order of equal shapes": lambda: [
            native.all_reduce(ones(4), label=label)
            for label in (("second", "first") if odd else ("first", "second"))
        ],
        "asynchronous": lambda: dist.all_reduce(ones(5 if odd else 4), async_op=True).wait(),
        "gather": lambda: dist.all_gather_into_tensor(ones((last + 1) * (4 + odd)), ones(4 + odd)),
        "skipped call": lambda: [dist.all_reduce(ones(n)) for n in ((6, 7) if odd else (5, 6))],
    }


def deviate(me, kind: str, odd_rank: int) -> dict:
    dist = join(me)
    learned = me.learn(calls(dist, me.rank == odd_rank)[kind])
    again = me.learn(lambda: dist.all_reduce(torch.ones(4)))
    assert again["type"] is not None, "the group goes on after a mismatch"
    dist.destroy_process_group()
    return learned


def miss(me, kind: str, odd_rank: int) -> dict:
    """One rank does not come, or comes once more than the others."""
    dist = join(me)
    dist.native().timeout = timedelta(seconds=SHORT_S)
    odd = me.rank == odd_rank
    learned = {}
    if kind == "missing call" and odd:
        me.wait_for("over")
        while not dist.native().has_failed():  # or the run's deadline is over
            time.sleep(0.002)
        learned = me.learn(lambda: dist.all_reduce(torch.ones(4)))
    elif kind == "missing call" or odd:
        learned = me.learn(lambda: dist.all_reduce(torch.ones(4)))
        if kind == "missing call":
            me.mark("learned")
    dist.destroy_process_group()
    return learned


def cross_groups(me, odd_rank: int) -> dict:
    """Equal calls of two groups, in another order on one rank: each group lacks somebody."""
    dist = join(me)
    groups = [dist.new_group(timeout=timedelta(seconds=SHORT_S)) for _ in range(2)]
    if me.rank == odd_rank:
        groups.reverse()
    learned = me.learn(lambda: [dist.all_reduce(torch.ones(4), group=g) for g in groups])
    me.mark("learned")
    for rank in range(me.world_size):
        me.wait_for(f"learned-{rank}")  # who leaves before would be what the others learn
    dist.destroy_process_group()
    return learned


def claim_world_size(me, odd_rank: int) -> dict:
    me.world_size += me.rank == odd_rank
    return me.learn(lambda: me.join(timeout_s=20))


class Twins(torch.nn.Module):
    """Two parameters of one shape."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(8, 8)))


def swap_buckets(me, odd_rank: int) -> dict:
    from libddp.nn.parallel import DistributedDataParallel

    dist = join(me)
    model = Twins(("b", "a") if me.rank == odd_rank else ("a", "b"))
    learned = me.learn(lambda: DistributedDataParallel(model, bucket_cap_mb=0.0001))
    dist.destroy_process_group()
    return learned
