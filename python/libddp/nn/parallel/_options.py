"""What the C++ side is told: sizes of buckets, mixed precision, delayed parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from libddp._load import load
from libddp.errors import ArgumentError
from libddp.nn.parallel._sparse import sparse_parameters

_C = load()
_MEBIBYTE = 1024 * 1024
_DEFAULT_CAP_MB = 25
_FIRST_BUCKET_BYTES = 1 * _MEBIBYTE


def bucket_bytes(bucket_cap_mb: float | None) -> int:
    """A size in bytes; of 0 MiB and less, as torch has it, one that no two gradients fit in."""
    if bucket_cap_mb is None:
        return _DEFAULT_CAP_MB * _MEBIBYTE
    return max(1, int(bucket_cap_mb * _MEBIBYTE))


def bucket_bytes_list(bucket_cap_mb_list: Sequence[float] | None) -> list[int]:
    """The limits of the first, second, ... bucket in bytes."""
    return [bucket_bytes(cap) for cap in bucket_cap_mb_list or ()]


def largest_bucket(bucket_cap_mb: float | None, each_bytes: list[int]) -> int:
    """The largest bucket in bytes; the list of limits goes before the one for all."""
    return max(each_bytes) if each_bytes else bucket_bytes(bucket_cap_mb)


def native_options(ddp, parameters: list, init_sync: bool, init_sync_buffers: bool):
    """DistributedDataParallelOptions of C++, for a model whose attributes are set."""
    options = _C.DistributedDataParallelOptions()
    options.cap_bytes = ddp.bucket_bytes_cap
    options.first_bytes = min(_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)
    options.hook_first_bytes = (
        _FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    )
    options.each_bytes = ddp.bucket_bytes_cap_list
    options.find_unused_parameters = ddp.find_unused_parameters
    options.static_graph = ddp.static_graph
    options.skip_unused_buckets = ddp.skip_all_reduce_unused_params
    options.gradient_as_bucket_view = ddp._asked_bucket_view
    options.sparse_parameters = sparse_parameters(ddp.module, parameters)
    options.broadcast_buffers = ddp.forward_sync_buffers
    options.init_sync = init_sync
    options.init_sync_buffers = init_sync_buffers
    if ddp.mixed_precision is not None:
        options.mixed_precision = _native_precision(ddp.mixed_precision)
    return options


def _native_precision(precision):
    try:
        dtypes = {
            f"{n}_dtype": getattr(precision, f"{n}_dtype") for n in ("param", "reduce", "buffer")
        }
    except AttributeError:
        raise ArgumentError(
            f"libddp: mixed_precision is {precision!r}. Hint: pass torch's _MixedPrecision of "
            "torch.nn.parallel.distributed."
        ) from None
    return _C.MixedPrecision(**dtypes)


def delayed_parameters(
    named: Iterable[tuple[str, torch.nn.Parameter]] | None, trigger: torch.nn.Parameter | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters to average later; ArgumentError where one argument comes without the other."""
    if (named is None) != (trigger is None):
        raise ArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time."
        )
    return list(named or ())
