"""What torch.compile knows of wrapped models.

Changes two things of torch's that are libddp's own affair. Dynamo's list of skipped folders gets
those of the wrappers: our frames are none of its business, it starts where the inner module starts,
as with torch's class. And `_active_ddp_module` of torch's DistributedDataParallel is the model
whose forward runs: dynamo asks torch's class, and cuts a graph into the pieces that fill a bucket,
so that their gradients come, and are sent, one piece after the other. There is no other way to tell
it. Wrapping a model asks for both; the first stays for good, the second ends with the forward.
"""

from __future__ import annotations

import torch.nn.parallel.distributed

from libddp._torch_patches import after_import

#: Whatever stands at its name later.
TorchsClass = torch.nn.parallel.distributed.DistributedDataParallel
_kept_out: set[str] = set()
#: Dynamo cuts no smaller pieces, and fails where it is told to.
_SMALLEST_PIECE = 1 << 20


class StandIn:
    """Announced in the place of a model whose buckets are smaller than dynamo's pieces."""

    bucket_bytes_cap = _SMALLEST_PIECE


def stand_in(bucket_bytes_cap: int) -> StandIn | None:
    """For a model with such buckets; None where it can be announced itself."""
    return StandIn() if bucket_bytes_cap < _SMALLEST_PIECE else None


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

    after_import.call("torch._dynamo.trace_rules", add)
