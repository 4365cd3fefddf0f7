"""Who we are among how many, and how the ranks agree.

ranks = join("auto")                      # alone, or one of many if a launcher started us
data = ranks.on_first(read_something)     # rank 0 calls it, every rank gets what it returned
leave(ranks)
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from errors import UserError
from libddp.distributed import (
    all_reduce,
    broadcast_object_list,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)


class Ranks(NamedTuple):
    """Thread rule: one thread."""

    rank: int
    world: int
    device: torch.device
    distributed: bool

    def on_first(self, function: Callable):
        """Call `function` on rank 0; return its result, or raise its UserError, on every rank."""
        if not self.distributed:
            return function()
        outcome = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except UserError as error:
                outcome[1] = str(error)
        broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise UserError(outcome[1])
        return outcome[0]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up `tensor` over the ranks, in place."""
        if self.distributed:
            all_reduce(tensor)
        return tensor


def join(wanted: str) -> Ranks:
    """Meet the other ranks. `wanted` is cpu, cuda or auto (cuda where there is one)."""
    kind = wanted
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(
            f"trainer_config.device={wanted}: there is no such device here. Hint: cpu, cuda or auto"
        )
    device = torch.device(kind)
    if kind == "cuda":
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count:
            raise UserError(
                f"trainer_config.device={wanted}: rank {index} of this host has no GPU, there are "
                f"{count}. Hint: start one rank for each, or trainer_config.device=cpu"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1, device, distributed=False)
    init_process_group()
    return Ranks(get_rank(), get_world_size(), device, distributed=True)


def leave(ranks: Ranks) -> None:
    if ranks.distributed:
        destroy_process_group()
