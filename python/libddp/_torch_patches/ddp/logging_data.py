"""What torch's DDP logger says of a model, under torch's keys, as far as libddp has the same thing.

Times (`avg_forward_compute_time` and so on) are not among them: `timings()` has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from libddp.distributed._groups import native

_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def collect(ddp) -> dict[str, Any]:
    """Strings and ints; sizes in bytes, lists as text with commas."""
    plan = ddp._replica.bucket_plan()
    data = {**_texts(ddp), **_numbers(ddp), "bucket_sizes": _bucket_sizes(ddp, ddp._first_plan)}
    if plan != ddp._first_plan:
        data["rebuilt_bucket_sizes"] = _bucket_sizes(ddp, plan)
    if ddp._comm_hooks:
        data["comm_hook"] = _name_of(ddp._comm_hooks[0].hook)
    elif ddp._builtin_hook is not None:
        data["comm_hook"] = str(ddp._builtin_hook)
    if ddp._last_error is not None:
        data |= {"has_error": 1, "error": ddp._last_error}
    return data


@contextmanager
def noted(ddp) -> Iterator[None]:
    """What is raised inside shows under "error"."""
    try:
        yield
    except Exception as error:
        note(ddp, error)
        raise


def note(ddp, error: BaseException) -> None:
    """An error of the model, in torch's form."""
    ddp.__dict__["_last_error"] = f"{type(error)}: {error}"


def _texts(ddp) -> dict[str, str]:
    dtypes = dict.fromkeys(p.dtype for p in ddp._trained)
    return {
        "module_name": type(ddp.module).__name__,
        "backend_name": "libddp",
        "dtypes": ", ".join(_DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes),
        "device_ids": "",
        "master_addr": os.environ.get("MASTER_ADDR", "N/A"),
        "master_port": os.environ.get("MASTER_PORT", "N/A"),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
    }


def _numbers(ddp) -> dict[str, int]:
    trained = ddp._trained
    return {
        "world_size": native(ddp.process_group).size(),
        "rank": native(ddp.process_group).rank(),
        "iteration": ddp._num_synchronised,
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(p.nbytes for p in trained),
        "num_buckets_reduced": len(ddp._replica.bucket_plan()) if ddp._num_synchronised else 0,
        "has_rebuilt_buckets": int(ddp._has_rebuilt_buckets),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "output_device": -1,
        "is_multi_device_module": 0,
        "has_sync_bn": 0,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": 0,
        "join_uneven_inputs": int(ddp._has_joined),
    }


def _bucket_sizes(ddp, plan: list[list[int]]) -> str:
    trained = ddp._trained
    return ", ".join(str(sum(trained[index].nbytes for index in bucket)) for bucket in plan)


def _name_of(hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
