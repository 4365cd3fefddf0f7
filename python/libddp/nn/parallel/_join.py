"""Uneven inputs: ranks that have run out of data take part in the others' collectives.

One iteration under `with model.join():` is, on every rank and in this order: the count of active
ranks (by torch's Join), the choice of a rank that has the buffers and their broadcast, the question
whether this iteration synchronises, and the buckets. Ranks that are done contribute zeros.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig


class DistributedDataParallelJoinHook(JoinHook):
    """What a rank does for one wrapped model after its own data has ended."""

    def __init__(self, ddp, divide_by_initial_world_size: bool) -> None:
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Mirrors one iteration of the ranks that still have data."""
        ddp = self.ddp
        broadcast_buffers(ddp, is_active=False)
        synchronises = agree_to_synchronise(ddp, False)
        # torch's rule for the next iteration's buffers.
        ddp.require_forward_param_sync = synchronises
        if synchronises:
            ddp._replica.run_empty_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take the model of one that has trained to the end."""
        ddp = self.ddp
        root = common_rank(ddp, is_last_joiner)
        ddp._replica.broadcast(ddp._model_tensors(), root)
        ddp._replica.set_gradient_scale(1.0)
        ddp._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it on


def before_forward(ddp) -> None:
    """What a rank with data does before each forward that records gradients."""
    work = Join.notify_join_context(ddp)
    if work is not None:
        work.wait()
    broadcast_buffers(ddp, is_active=True)
    agree_to_synchronise(ddp, ddp.require_backward_grad_sync)


def broadcast_buffers(ddp, is_active: bool) -> None:
    """Where it is due, from a rank whose buffers are still trained."""
    if ddp._buffers_are_due():
        ddp._replica.broadcast(ddp._buffer_tensors(), common_rank(ddp, is_active))


def agree_to_synchronise(ddp, wanted: bool) -> bool:
    """Whether the ranks with data synchronise in this iteration; sets what they divide by."""
    votes = torch.tensor([1.0 if wanted else 0.0])
    dist.all_reduce(votes, group=ddp.process_group)
    num_active = votes.item()
    if num_active > 0 and not ddp._divide_by_initial_world_size:
        # Every rank reduces a slice for all, so the joined ones need the factor too.
        ddp._replica.set_gradient_scale(dist.get_world_size(ddp.process_group) / num_active)
    return num_active > 0


def common_rank(ddp, is_candidate: bool) -> int:
    """The highest rank of the group that is a candidate."""
    rank = torch.tensor([dist.get_rank(ddp.process_group) if is_candidate else -1])
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return int(rank.item())
