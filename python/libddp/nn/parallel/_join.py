"""Uneven inputs: ranks that have run out of data take part in the others' collectives.

One iteration under `with model.join():` is, on every rank and in this order: the count of active
ranks (by torch's Join), the choice of a rank that has the buffers and their broadcast, the question
whether this iteration synchronises, and the buckets. Ranks that are done contribute zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from libddp.errors import StateError


class TakesUnevenInputs(Joinable):
    """The part of DistributedDataParallel that torch's Join calls."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of batches.

        A rank that is done takes part in the others' collectives until all are done; then every
        rank has the model of one that trained to the end.

        Args:
            divide_by_initial_world_size: average over all ranks; False = over those with data.
            enable: False = as if it were not there.
            throw_on_early_termination: RuntimeError on every rank once the first one is done.

        Example:
            >>> with model.join():                                     # doctest: +SKIP
            ...     for x in uneven_loader:
            ...         model(x).sum().backward()
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DistributedDataParallelJoinHook:
        """For torch.distributed.algorithms.Join."""
        divide = kwargs.get("divide_by_initial_world_size", True)
        return DistributedDataParallelJoinHook(self, divide)

    @property
    def join_device(self) -> torch.device:
        """For torch.distributed.algorithms.Join, which reads how many ranks have data on the host.

        That of a model on a GPU too: the group's CPU tensors make no device wait for it.
        """
        return torch.device("cpu")

    @property
    def join_process_group(self):
        """For torch.distributed.algorithms.Join."""
        return self.process_group


class _Ended(_JoinConfig):
    """Behind a join, which torch leaves on: what that means for buffers is torch's here too."""


class DistributedDataParallelJoinHook(JoinHook):
    """What a rank does for one wrapped model after its own data has ended."""

    def __init__(self, ddp, divide_by_initial_world_size: bool) -> None:
        if ddp.buffer_hook is not None:
            raise StateError(
                "libddp: a model with a buffer communication hook cannot join uneven inputs: a "
                "rank without data has no forward to call the hook around. Hint: leave the hook or "
                "the join context out."
            )
        if ddp._is_sharded:
            raise StateError(
                "libddp: a model whose optimizer is sharded over the ranks cannot join uneven "
                "inputs: a rank without data would not update its part. Hint: leave out "
                "AdamW(shard_over=...) or the join context."
            )
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Mirrors one iteration of the ranks that still have data."""
        ddp = self.ddp
        if ddp.will_sync_module_buffers():
            ddp._replica.broadcast(ddp.modules_buffers, common_rank(ddp, False))
        synchronises, has_gradients = agree_to_synchronise(ddp, False)
        # torch's rule for the next iteration's buffers.
        ddp.require_forward_param_sync = synchronises
        if has_gradients:
            ddp._replica.run_empty_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take the model of one that has trained to the end."""
        ddp = self.ddp
        root = common_rank(ddp, is_last_joiner)
        ddp._replica.broadcast(ddp._model_tensors(), root)
        ddp._replica.set_gradient_scale(1.0)
        ddp._join_config = _Ended(*_JoinConfig.construct_disabled_join_config())


def before_forward(ddp) -> None:
    """What a rank with data does before each forward that records gradients."""
    work = Join.notify_join_context(ddp)
    if work is not None:
        work.wait()
    if ddp.will_sync_module_buffers():
        ddp._sync_buffers()
    agree_to_synchronise(ddp, ddp.require_backward_grad_sync)


def agree_to_synchronise(ddp, wanted: bool) -> tuple[bool, bool]:
    """Whether the ranks with data synchronise in this iteration, and gradients; sets the divisor.

    They have none to average while all parameters are frozen.
    """
    trains = wanted and any(p.requires_grad for p in ddp._trained)
    votes = torch.tensor([float(wanted), float(trains)], device="cpu")
    dist.all_reduce(votes, group=ddp.process_group)
    num_active, num_training = votes.tolist()
    if num_active > 0 and not ddp._divide_by_initial_world_size:
        # Every rank reduces a slice for all, so the joined ones need the factor too.
        ddp._replica.set_gradient_scale(dist.get_world_size(ddp.process_group) / num_active)
    return num_active > 0, num_training > 0


def buffers_root(ddp) -> int:
    """Whose buffers all ranks take before a forward; within a join a collective."""
    if ddp._join_config.enable:
        return common_rank(ddp, True)
    is_behind = isinstance(ddp._join_config, _Ended)
    return dist.get_world_size(ddp.process_group) - 1 if is_behind else 0


def common_rank(ddp, is_candidate: bool) -> int:
    """The highest rank of the group that is a candidate."""
    return highest(ddp, dist.get_rank(ddp.process_group) if is_candidate else -1)


def highest(ddp, value: int) -> int:
    """The largest value of all ranks."""
    shared = torch.tensor([value], device="cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return int(shared.item())
