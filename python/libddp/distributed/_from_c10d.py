"""Groups of torch's other backends (Gloo, MPI, UCC) as groups of libddp."""

from __future__ import annotations

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend as _TorchBackend

from libddp._load import load
from libddp.distributed import _exit, _groups
from libddp.errors import ArgumentError

_C = load()


def from_c10d(group=None) -> _C.ProcessGroup:
    """A libddp group that moves its bytes through another library's group.

    DistributedDataParallel takes it as `process_group`, the calls of libddp.distributed as `group`;
    the torch group itself stands for it there from now on. What is torch's own under
    libddp.distributed (objects, gather, scatter, isend) takes the torch group.

    Args:
        group: a torch.distributed.ProcessGroup with a backend for CPU tensors, an object of a
            subclass of it (a group written in Python, which must outlive what is returned), a
            backend object (torch.distributed.ProcessGroupGloo), or None for the default group. One
            of libddp's own is handed back as it is.

    Returns:
        The C++ group: `rank()`, `size()`, `all_reduce(tensor)`, ...

    Raises:
        ArgumentError: not a group, or one that this rank is not in, or without CPU tensors.
        StateError: there is no default group.

    Note:
        No communication. Ranks that call different things are found, or not, by the other library.
        Its errors are raised as PeerError, TimeoutError or NetworkError, with its text.

    Example:
        >>> import torch.distributed as dist                           # doctest: +SKIP
        >>> dist.init_process_group("gloo")                            # doctest: +SKIP
        >>> model = DistributedDataParallel(net, process_group=from_c10d())  # doctest: +SKIP
    """
    found = _groups.find(group)
    if found is not None:
        return found
    _groups.check_members(group)
    if group is None:
        group = c10d._world.default_pg
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("libddp: from_c10d: this rank is not a member of the group.")
    if not isinstance(group, (c10d.ProcessGroup, _TorchBackend)):
        raise ArgumentError(
            f"libddp: from_c10d: {group!r} is a {type(group).__name__}. Hint: pass a group of "
            "torch.distributed, as new_group() returns it."
        )
    _exit.install(c10d.get_rank() if c10d.is_initialized() else 0)
    if not isinstance(group, c10d.ProcessGroup):
        return _C.from_c10d(group)
    ranks = c10d.get_process_group_ranks(group) if group in c10d._world.pg_group_ranks else []
    native = _C.from_c10d(group, name=_name_of(group), global_ranks=ranks)
    _groups.remember(group, native)
    return native


def _name_of(group: c10d.ProcessGroup) -> str:
    """For errors."""
    return f"c10d {group.group_name if _groups.has_name(group) else group.name()}"
