"""libddp: fast distributed training on LibTorch.

Take torch's path and swap the first word:

    from libddp.distributed import init_process_group, destroy_process_group
    from libddp.nn.parallel import DistributedDataParallel as DDP
    from libddp.utils.data.distributed import DistributedSampler

Importing this package alone loads nothing: `import torch` does it to find the "libddp" backend.
The exception classes of `libddp.errors` and the sub-packages are loaded when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from libddp._version import __version__

if TYPE_CHECKING:
    from libddp import distributed, errors, nn, utils
    from libddp.errors import (
        ArgumentError,
        DeviceError,
        Error,
        NetworkError,
        PeerError,
        SnapshotError,
        StateError,
        StoreError,
        TimeoutError,
    )

_PACKAGES = ("distributed", "errors", "nn", "utils")

__all__ = [
    "ArgumentError",
    "DeviceError",
    "Error",
    "NetworkError",
    "PeerError",
    "SnapshotError",
    "StateError",
    "StoreError",
    "TimeoutError",
    "__version__",
    "distributed",
    "errors",
    "nn",
    "utils",
]


def __getattr__(name: str):
    if name in _PACKAGES:
        return import_module(f"libddp.{name}")
    if name in __all__:
        return getattr(import_module("libddp.errors"), name)
    raise AttributeError(f"module 'libddp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
