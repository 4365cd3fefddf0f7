"""What libraries ask of the inside of torch's DistributedDataParallel, on libddp's.

Lightning and Accelerate reach past the public names: they arm the reducer themselves where a loop
decides late to synchronise, and read the logging data. libddp.install() gives its class these names
as long as torch's class is replaced.
"""

from __future__ import annotations

import torch.distributed as dist


class Reducer:
    """The handle `model.reducer` of a wrapped model."""

    def __init__(self, model) -> None:
        self._model = model

    def prepare_for_backward(self, outputs) -> None:
        """The next backward pass averages gradients, as after a synchronising forward."""
        self._model._replica.after_forward(outputs, True)

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt in the backward pass: never here."""
        return False

    def _delay_all_reduce(self) -> None:
        """torch's way to reduce the first pass of a static graph; ours is reduced in backward."""


def get_ddp_logging_data(model) -> dict:
    """What torch's logger would say of this model, as far as it has a meaning here."""
    group = model.process_group or dist.group.WORLD
    return {
        "world_size": group.size(),
        "rank": group.rank(),
        "module_name": type(model.module).__name__,
        "backend_name": "libddp",
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "broadcast_buffers": model.broadcast_buffers,
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "can_set_static_graph": False,
    }


#: Attributes of the class that torch's has and libddp's may lack.
ATTRIBUTES = {"reducer": property(Reducer), "_get_ddp_logging_data": get_ddp_logging_data}
