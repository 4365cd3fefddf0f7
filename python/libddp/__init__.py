"""libddp: fast distributed training on LibTorch.

Take torch's path and swap the first word:

    from libddp.distributed import init_process_group, destroy_process_group
    from libddp.nn.parallel import DistributedDataParallel as DDP
    from libddp.utils.data.distributed import DistributedSampler

Importing this package alone loads nothing: `import torch` does it to find the "libddp" backend.
The exception classes of `libddp.errors` and the sub-packages are loaded when they are asked for.

`install()` does without swapping: torch's own names then answer libddp's (docs/drop_in.md).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from libddp._autoload import drop_in_wanted
from libddp._version import __version__

if TYPE_CHECKING:
    from libddp import distributed, elastic, errors, nn, optim, plan, snapshot, utils
    from libddp._torch_patches.drop_in import install, uninstall
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
    from libddp.snapshot import Snapshot

_PACKAGES = ("distributed", "elastic", "errors", "nn", "optim", "plan", "snapshot", "utils")
_DROP_IN = ("install", "uninstall")

__all__ = [
    "ArgumentError",
    "DeviceError",
    "Error",
    "NetworkError",
    "PeerError",
    "Snapshot",
    "SnapshotError",
    "StateError",
    "StoreError",
    "TimeoutError",
    "__version__",
    "distributed",
    "elastic",
    "errors",
    "install",
    "nn",
    "optim",
    "plan",
    "snapshot",
    "uninstall",
    "utils",
]


def __getattr__(name: str):
    if name in _PACKAGES:
        return import_module(f"libddp.{name}")
    if name in _DROP_IN:
        return getattr(import_module("libddp._torch_patches.drop_in"), name)
    if name == "Snapshot":
        return import_module("libddp.snapshot").Snapshot
    if name in __all__:
        return getattr(import_module("libddp.errors"), name)
    raise AttributeError(f"module 'libddp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if "LIBDDP_LAUNCHER_PID" in os.environ:  # of `libddp run`, or of a process below it
    from libddp._worker import watch

    watch()

if drop_in_wanted():
    # torch first: at its end it installs libddp, for which no part of libddp may be half imported.
    import torch  # noqa: F401
