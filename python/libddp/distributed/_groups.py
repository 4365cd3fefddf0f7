"""libddp's process group behind a torch process group.

`native(group)` answers the C++ group (`libddp._C.ProcessGroup`) that moves the bytes of a
`torch.distributed.ProcessGroup`; `None` means the default group, whether it was initialised through
`libddp.distributed.init_process_group` or through `torch.distributed.init_process_group("libddp")`.
Everything of ours that takes a `process_group` argument goes through it:

    group = native(process_group)     # torch group, our own group, or None
    group.rank(), group.size(), group.all_reduce(tensor)

`find(group)` is the same for hot paths: None instead of an error where the group is not ours.
Answers are kept as long as the torch group lives, and no longer; not of groups that
`torch.distributed._reconfigure` changes, which have another C++ group each time, and none at first.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed.distributed_c10d as c10d

from libddp._load import load
from libddp.errors import ArgumentError, StateError

_C = load()
_CPU = torch.device("cpu")
_natives: WeakKeyDictionary = WeakKeyDictionary()
#: libddp's group -> weak reference to the torch group that it answers for
_torch_sides: WeakKeyDictionary = WeakKeyDictionary()
#: libddp's groups whose bytes another backend moves
_wrapped: WeakSet = WeakSet()


class NotInitialized(StateError, ValueError):
    """There is no default group: with torch, which scripts go by, a ValueError."""


def find(group=None):
    """The C++ group behind `group`, or None where it is not one of libddp's.

    Raises:
        StateError: (here a ValueError too) `group` is None and there is no default group.
    """
    if group is None:
        group = c10d._world.default_pg
        if group is None:
            raise NotInitialized(
                "libddp: the default process group is not initialised. "
                "Hint: call libddp.distributed.init_process_group() first."
            )
    try:
        return _natives[group]
    except KeyError:
        return _look_up(group)
    except TypeError:  # torch's NON_GROUP_MEMBER is a plain object, to which no weak reference goes
        return None


def native(group=None) -> _C.ProcessGroup:
    """The C++ group behind `group`; the default group where it is None.

    Args:
        group: a `torch.distributed.ProcessGroup`, a `libddp._C.ProcessGroup`, or None.

    Raises:
        StateError: there is no default group.
        ArgumentError: the group runs on another backend, or this rank is not in it.

    Example:
        >>> from libddp.distributed._groups import native
        >>> native().size()  # after init_process_group()  # doctest: +SKIP
        2
    """
    found = find(group)
    if found is not None:
        return found
    check_members(group)
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("libddp: this rank is not a member of the process group it was given.")
    name = group.name() if isinstance(group, c10d.ProcessGroup) else repr(group)
    raise ArgumentError(
        f"libddp: the process group runs on backend {name!r}, not on libddp. Hint: create it with "
        'libddp.distributed.new_group(), or initialise torch.distributed with backend "libddp"; '
        "libddp.distributed.from_c10d() makes one of libddp's over it."
    )


def check_members(group) -> None:
    """Raises StateError where `group` is one of libddp's that has no members yet, or no more."""
    if group is None:
        group = c10d._world.default_pg
    if isinstance(group, c10d.ProcessGroup) and _CPU in group._device_types:
        backend = backend_of(group, _CPU)
        if _C.is_reconfigurable(backend):
            _C.members_of(backend)


def remember(torch_group: c10d.ProcessGroup, group: _C.ProcessGroup) -> None:
    """From now on `group` is what answers for `torch_group`, of another backend, and back."""
    _natives[torch_group] = group
    _torch_sides[group] = ref(torch_group)
    _wrapped.add(group)
    _C.forget_straight()


def is_wrapped(torch_group) -> bool:
    """Whether another backend moves the bytes of a torch group that libddp has wrapped."""
    found = find(torch_group)
    return found is not None and found in _wrapped


def torch_side(group):
    """What torch's functions take for `group`: the torch group that it answers for, or itself."""
    if isinstance(group, _C.ProcessGroup):
        found = _torch_sides.get(group)
        return group if found is None else found() or group
    return group


def has_name(torch_group: c10d.ProcessGroup) -> bool:
    """Whether torch knows it or has known it, which names what it makes; not what programs make."""
    try:
        return bool(torch_group.group_name)
    except (RuntimeError, ValueError):  # a class written in Python may have others than torch's
        return False


def _look_up(group):
    """Asks torch for the backend of CPU tensors, and the backend for our group."""
    if isinstance(group, _C.ProcessGroup):
        return group
    if not isinstance(group, c10d.ProcessGroup):
        return None
    found = None
    if _CPU in group._device_types:
        found = _ours(group, _CPU)
        if _C.is_reconfigurable(backend_of(group, _CPU)):
            return found
        others = found and [d for d in group._device_types if _ours(group, d) is None]
        if others:
            _C.from_c10d(group)  # that backend moves the accelerator's tensors of our group
    _natives[group] = found
    if found is not None:
        _torch_sides[found] = ref(group)
    return found


def _ours(group, device: torch.device):
    """The C++ group behind the backend for a device; None where that is another library's."""
    return _C.group_of_backend(backend_of(group, device))


def backend_of(group, device: torch.device):
    backend = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends once
    return getattr(backend, "wrapped_pg", backend)


_C.prepare_straight(c10d, find, _natives, torch.nn.Parameter)
