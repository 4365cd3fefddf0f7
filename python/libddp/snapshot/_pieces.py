"""A tensor as the C++ core takes it, and who stores it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class StoredBy(IntEnum):
    """As libddp/snapshot/snapshot_tensor.h has it."""

    #: The rank that gives it: others have other elements, or keys of their own.
    EACH_RANK = 0
    #: The first rank of each host: the others have something like it.
    FIRST_OF_HOST = 1
    #: The ranks of each host, a part each: it is the same on all of them, bit for bit.
    HOST_TOGETHER = 2


@dataclass
class Piece:
    """Elements [begin, end) of a tensor."""

    key: str
    tensor: torch.Tensor
    #: Of the whole tensor.
    shape: torch.Size
    begin: int
    end: int
    stored_by: StoredBy

    @staticmethod
    def whole(key: str, tensor: torch.Tensor, stored_by: StoredBy) -> Piece:
        """All of it."""
        return Piece(key, tensor.detach(), tensor.shape, 0, tensor.numel(), stored_by)

    def for_core(self) -> tuple:
        """As libddp._C.Snapshot takes it."""
        return (
            self.key,
            self.tensor,
            list(self.shape),
            self.begin,
            self.end,
            int(self.stored_by),
        )
