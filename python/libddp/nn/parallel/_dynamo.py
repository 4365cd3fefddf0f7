"""What torch.compile knows of wrapped models.

Dynamo asks torch's class which model runs its forward, and cuts a graph into the pieces that fill a
bucket, so that their gradients come, and are sent, one piece after the other. Our own frames are
none of its business: it starts where the inner module starts, as with torch's class.
"""

from __future__ import annotations

from torch.nn.parallel.distributed import DistributedDataParallel as TorchsClass

from libddp import _after_import

_kept_out: set[str] = set()
#: Dynamo cuts no smaller pieces, and fails where it is told to.
_SMALLEST_PIECE = 1 << 20


class StandIn:
    """Announced in the place of a model whose buckets are smaller than dynamo's pieces."""

    bucket_bytes_cap = _SMALLEST_PIECE


def stand_in(bucket_bytes_cap: int) -> StandIn | None:
    """For a model with such buckets; None where it can be announced itself."""
    return StandIn() if bucket_bytes_cap < _SMALLEST_PIECE else None


class ActiveModule:
    """`_active_ddp_module` of the class and of its objects: the model whose forward runs, if any.

    Dynamo reads torch's class, so the value lives there.
    """

    def __get__(self, instance, owner):
        return TorchsClass._active_ddp_module


def keep_out(package: str) -> None:
    """Dynamo does not trace the frames of a package, but what they call.

    To be called again when models are made: dynamo may be in the middle of its import now.
    """
    if package in _kept_out:
        return

    def add(rules) -> None:
        if hasattr(rules, "add"):
            rules.add(package)
            _kept_out.add(package)

    _after_import.call("torch._dynamo.trace_rules", add)
