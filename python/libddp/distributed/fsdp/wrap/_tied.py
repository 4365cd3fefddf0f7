"""Weights that a script ties once they are sharded: `model.head.weight = model.embedding.weight`.

Transformers does so with models that it has sharded on the meta device. As with torch the modules
share one DTensor, and its gradients are added up: both become one unit, as of
`fully_shard([embedding, head])`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._sharded_param import ShardedParam
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


def find(wrapped: WrappedModule | None, parameter: torch.Tensor) -> ShardedParam | None:
    """That of the unit whose modules have `parameter` now."""
    params = wrapped.params if wrapped is not None else ()
    return next((param for param in params if param.is_at_a_place(parameter)), None)


def has_no_other(part: torch.nn.Module, parameter: torch.Tensor) -> bool:
    """Whether it is all that `part` has: others stay in a unit that is not open with this one."""
    return all(other is parameter for other in part.parameters())
