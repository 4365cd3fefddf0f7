"""Exceptions of libddp.

Each one subclasses torch's `DistError` family and, where there is one, the builtin that fits, so
`except` clauses written for torch.distributed still catch:

| class | also a | when |
|---|---|---|
| ArgumentError | DistError, ValueError | the caller's mistake, found before any byte moves |
| StateError | DistError (RuntimeError) | the wrong time: not initialised, group aborted |
| StoreError | DistStoreError | the rendezvous store is lost, or a key was never set |
| NetworkError | DistNetworkError | a connection could not be made, or was lost |
| TimeoutError | DistNetworkError, builtins.TimeoutError | a deadline passed |
| PeerError | DistBackendError | another rank died, failed, or called something else |
| DeviceError | DistBackendError | CUDA or NCCL failed |
| SnapshotError | DistError (RuntimeError) | a snapshot is missing, damaged or cannot be written |

Example:
    >>> from libddp.errors import PeerError
    >>> issubclass(PeerError, RuntimeError)
    True
"""

from __future__ import annotations

import builtins

from torch.distributed import DistBackendError, DistError, DistNetworkError, DistStoreError

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
]


class Error(DistError):
    """Root of libddp's exceptions."""


class ArgumentError(Error, ValueError):
    """The caller's mistake, found before any byte moves: shape, dtype, device, rank, root."""


class StateError(Error):
    """Called at the wrong time: not initialised, group aborted, backward twice."""


class StoreError(Error, DistStoreError):
    """The rendezvous store is lost, or a key was never set."""


class NetworkError(Error, DistNetworkError):
    """A connection could not be made, or was lost."""


class TimeoutError(Error, DistNetworkError, builtins.TimeoutError):
    """A deadline passed."""


class PeerError(Error, DistBackendError):
    """Another rank died, failed, or called something else."""

    #: Rank of the culprit in the group; -1 where several ranks disagree.
    peer_rank: int = -1
    #: Process id of the culprit; 0 where it is not known.
    peer_pid: int = 0


class DeviceError(Error, DistBackendError):
    """CUDA or NCCL failed; their text is kept."""


class SnapshotError(Error):
    """A snapshot file is missing, truncated or damaged, or cannot be written."""
