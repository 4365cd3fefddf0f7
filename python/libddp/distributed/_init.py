"""Beginning and end of the default process group, and sub-groups.

One process group serves two libraries: `init_process_group` also becomes torch's default group, so
torch's DistributedSampler, DCP, DTensor, Accelerate and others see the ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from libddp._load import load
from libddp.distributed import _alone, _backend, _exit, _groups, _links
from libddp.distributed._from_c10d import from_c10d
from libddp.errors import ArgumentError

_C = load()
#: torch's own, also after libddp.install() has put libddp's in their places.
_torch_init, _torch_new_group = c10d.init_process_group, c10d.new_group
_torch_get_backend = c10d.get_backend
#: Newer versions of torch keep the order in which a script names ranks.
_KEEPS_ORDER = "sort_ranks" in inspect.signature(_torch_new_group).parameters
_CAN_RECONFIGURE = (
    _C.HAS_RECONFIGURE and "enable_reconfigure" in inspect.signature(_torch_init).parameters
)
_IN_NO_PART = c10d.GroupMember.NON_GROUP_MEMBER if _KEEPS_ORDER else None
DEFAULT_TIMEOUT = timedelta(minutes=30)
_OUR_SCHEMES = ("env", "tcp", "file")
#: group -> the backend name that its creator passed
_reported: WeakKeyDictionary = WeakKeyDictionary()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: dist.Store | None = None,
    group_name: str = "",
    pg_options=None,
    device_id: torch.device | int | None = None,
    _ranks: list[int] | None = None,
    enable_reconfigure: bool = False,
    require_key: bool = False,
    *,
    inter=None,
    wire_dtype: torch.dtype | None = None,
    sockets_per_link: int | None = None,
) -> None:
    """Joins the default process group; blocks until all ranks have come.

    Args:
        backend: "gloo" (libddp's host backend), "nccl", "cpu:gloo,cuda:nccl", "libddp", "shm",
            "auto" or None (what the machine has).
        init_method: "env://" (default: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; where no
            variable of a launcher is set, this process is a group of one, and a warning says so),
            "tcp://host:port" or "file:///path".
        timeout: deadline of every operation and of joining; None = 30 minutes.
        world_size, rank: number of ranks, and this process's; -1 = from the environment or the URL.
        store: used instead of `init_method`; `rank` and `world_size` are then required.
        group_name: without effect, as in torch; it names the group by `_ranks`, if there are any.
        pg_options: handed to the backend, of which libddp's own takes none.
        device_id: the CUDA device of this process; a CPU device is accepted and has no effect.
        enable_reconfigure: torch.distributed._reconfigure() names the members (docs/c10d.md).
        require_key: ranks on several hosts without a run key are an error (docs/security.md); as
            LIBDDP_REQUIRE_KEY=1. Without it they start with a warning.
        inter: what moves collectives between hosts: None (libddp's TCP links), "gloo", "ucc", a
            torch group of one rank per host, or a function that makes a backend (docs/hosts.md).
            This one and the next two count for groups made later, too.
        wire_dtype: torch.bfloat16 = large float32 sums travel between hosts as bf16; torch.float32
            = they do not; None = as LIBDDP_WIRE_DTYPE says.
        sockets_per_link: connections between each two hosts and each kind of bytes, 1 to 8; None =
            as LIBDDP_SOCKETS_PER_LINK says.

    Raises:
        ArgumentError: a missing, contradictory or impossible argument or variable; it is named.
        NetworkError: the store cannot be reached, or its port is in use.
        TimeoutError: a rank never came; it is named.
        PeerError: ranks disagree, or two have one number.

    Example:
        >>> import os
        >>> from libddp.distributed import destroy_process_group, init_process_group
        >>> init_process_group("gloo", rank=0, world_size=1)
        >>> destroy_process_group()
    """
    if c10d.GroupMember.WORLD is not None:
        raise ArgumentError(
            "libddp: trying to initialize the default process group twice! "
            "Hint: call destroy_process_group() before the second init_process_group()."
        )
    more = _reconfiguring(enable_reconfigure) | ({"_ranks": _ranks} if _ranks else {})
    choice = _backend.choose(backend)
    timeout = _checked_timeout(timeout)
    _links.set_default(inter, wire_dtype, sockets_per_link)
    store, rank, world_size, visit = _rendezvous(store, init_method, rank, world_size, timeout)
    with _requiring_key(require_key):
        _torch_init(
            choice.torch_name,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            pg_options=pg_options,
            device_id=_accelerator(device_id),
            **more,
        )
    _reported[c10d.GroupMember.WORLD] = choice.reported
    if visit is not None:
        _C.remember_store(*visit)


def _reconfiguring(enable_reconfigure: bool) -> dict:
    """What torch's own function takes for it; older ones do not know the name."""
    if not enable_reconfigure:
        return {}
    if not _CAN_RECONFIGURE:
        raise ArgumentError(
            "libddp: enable_reconfigure=True needs a torch with torch.distributed._reconfigure "
            f"(2.15), and this is {torch.__version__}. Hint: update torch and libddp."
        )
    return {"enable_reconfigure": True}


@contextlib.contextmanager
def _requiring_key(require_key: bool):
    """For the first group only: no later one can span hosts without a key if it did not."""
    variable, before = "LIBDDP_REQUIRE_KEY", os.environ.get("LIBDDP_REQUIRE_KEY")
    if require_key:
        os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ[variable] = before
        elif require_key:
            os.environ.pop(variable, None)


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Leaves a group in order; None = the default group and every other one with it.

    Raises:
        StateError: there is no default group.
    """
    if group is None:
        _groups.find(None)  # raises our error where there is none
        _links.forget_default()
    _exit.announce_error_in_flight()
    dist.destroy_process_group(group)


def new_group(
    ranks=None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options=None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
    *,
    inter=None,
    wire_dtype: torch.dtype | None = None,
    sockets_per_link: int | None = None,
):
    """A group of some of the default group's ranks. All ranks must call it, members or not.

    Arguments as in torch.distributed.new_group; `backend` as in init_process_group, None = as the
    default group, also where from_c10d() has wrapped that: the new group is wrapped then too;
    `inter`, `wire_dtype` and `sockets_per_link` too. sort_ranks=False (group ranks in the order of
    `ranks`) needs a torch that has it.
    """
    more = {}
    if not sort_ranks:
        if not _KEEPS_ORDER:
            raise ArgumentError(
                f"libddp: new_group(sort_ranks=False) needs a newer torch than {torch.__version__}."
            )
        more["sort_ranks"] = False
    choice = None if backend is None else _backend.choose(backend)
    with _links.making(inter, wire_dtype, sockets_per_link):
        group = _torch_new_group(
            ranks,
            timeout=None if timeout is None else _checked_timeout(timeout),
            backend=choice and choice.torch_name,
            pg_options=pg_options,
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
            device_id=_accelerator(device_id),
            **more,
        )
    if isinstance(group, dist.ProcessGroup):
        if choice:
            _reported[group] = choice.reported
        elif _groups.is_wrapped(c10d.GroupMember.WORLD):
            from_c10d(group)
    return group


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: list | None = None,
    timeout: timedelta | None = None,
    pg_options=None,
    group_desc: str | None = None,
    backend: str | None = None,
):
    """This rank's part of a group cut into parts. All ranks of `parent_pg` must call it.

    Args:
        parent_pg: None = the default group. torch's own function in 2.11 wants one with CUDA.
        split_ranks: lists of ranks of `parent_pg`; without a rank in two of them.
        timeout: None = 30 minutes.
        pg_options: as in new_group.
        group_desc: as in new_group.
        backend: as in new_group; newer versions of torch have it.

    Returns:
        The group of this rank's part; for a rank in none GroupMember.NON_GROUP_MEMBER. Its ranks
        are ordered as in `split_ranks`. With torch 2.11, as there: by rank, and None.

    Raises:
        ArgumentError: a part is empty, names a rank twice or one that is not there.
    """
    parent = parent_pg or c10d.GroupMember.WORLD
    global_ranks = _groups.native(parent).global_ranks()
    if not split_ranks:
        raise ArgumentError("libddp: split_group: split_ranks is empty. Hint: pass lists of ranks.")
    named = [rank for part in split_ranks for rank in part]
    if not all(split_ranks) or len(set(named)) < len(named):
        raise ArgumentError(
            f"libddp: split_group: split_ranks={split_ranks} has an empty part or a rank twice."
        )
    if not set(named) <= set(range(len(global_ranks))):
        raise ArgumentError(
            f"libddp: split_group: split_ranks={split_ranks} names a rank that the parent group "
            f"of {len(global_ranks)} does not have. Hint: they are ranks of the parent group."
        )
    if not _KEEPS_ORDER:
        split_ranks = [sorted(part) for part in split_ranks]
    own = next((part for part in split_ranks if dist.get_rank(parent) in part), None)
    if _groups.is_wrapped(parent) and (own or parent is c10d.GroupMember.WORLD):
        parts = [[global_ranks[rank] for rank in part] for part in split_ranks]
        return _split_wrapped(parent, parts, timeout, pg_options, group_desc)
    if own is None:
        # torch 2.15 counts groups made by their members alone: a rank in no part counts along, else
        # the groups that all ranks make later have other names here.
        c10d._process_group_name(global_ranks, use_hashed_name=True)
        return _IN_NO_PART
    return new_group(
        [global_ranks[rank] for rank in own],
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
        sort_ranks=not _KEEPS_ORDER,
    )


def _split_wrapped(parent, parts: list[list[int]], timeout, pg_options, group_desc):
    """The part of a group of another backend: torch makes it, libddp wraps it."""
    # All ranks of the default group make all parts, which every backend can (MPI: no other way).
    is_whole = parent is c10d.GroupMember.WORLD
    mine, more = _IN_NO_PART, {"sort_ranks": False} if _KEEPS_ORDER else {}
    for part in parts:
        if not is_whole and dist.get_rank() not in part:
            continue
        group = _torch_new_group(
            part,
            timeout=None if timeout is None else _checked_timeout(timeout),
            backend=_torch_get_backend(parent),
            pg_options=pg_options,
            use_local_synchronization=not is_whole,
            group_desc=group_desc,
            **more,
        )
        mine = group if dist.get_rank() in part else mine
    if isinstance(mine, dist.ProcessGroup):
        from_c10d(mine)
    return mine


def get_backend(group: dist.ProcessGroup | None = None) -> str:
    """The backend's name as the group's creator passed it: "gloo", "nccl", ...

    A sub-group that was created without one answers as the default group does.
    """
    _groups.find(group)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return _torch_get_backend(group)  # of a group without this rank: torch's ValueError
    known = _reported.get(group or c10d.GroupMember.WORLD)
    if known is not None:
        return known
    name = str(_torch_get_backend(group))
    default = c10d.GroupMember.WORLD
    return _reported.get(default, name) if name == str(_torch_get_backend(default)) else name


def _checked_timeout(timeout: timedelta | None) -> timedelta:
    if timeout is None:
        return DEFAULT_TIMEOUT
    if not isinstance(timeout, timedelta):
        raise ArgumentError(
            f"libddp: timeout={timeout!r} is a {type(timeout).__name__}. "
            "Hint: pass a datetime.timedelta."
        )
    if timeout <= timedelta(0):
        raise ArgumentError(
            f"libddp: timeout={timeout} is not positive. Hint: pass None for 30 min."
        )
    return timeout


def _check_store_arguments(init_method, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise ArgumentError("libddp: both store and init_method are given. Hint: pass one of them.")
    if world_size < 1:
        raise ArgumentError(
            f"libddp: store is given, but world_size={world_size}. Hint: pass the number of ranks."
        )
    if not 0 <= rank < world_size:
        raise ArgumentError(
            f"libddp: store is given, but rank={rank} with world_size={world_size}. "
            f"Hint: pass a rank from 0 to {world_size - 1}."
        )


def _rendezvous(store, init_method: str | None, rank: int, world_size: int, timeout: timedelta):
    """(store, rank, world_size, visit); schemes that a user registered with torch are torch's.

    visit: of the store, to be remembered when the group has been made; None = nothing to remember.
    """
    if store is not None:
        _check_store_arguments(init_method, rank, world_size)
        return store, rank, world_size, None
    if _alone.is_alone(init_method, rank, world_size):
        return *_alone.rendezvous(), None
    init_method = init_method or "env://"
    scheme = init_method.partition("://")[0]
    if scheme not in _OUR_SCHEMES:
        try:
            store, rank, world_size = next(
                dist.rendezvous(init_method, rank, world_size, timeout=timeout)
            )
        except RuntimeError as error:
            raise ArgumentError(
                f"libddp: init_method={init_method!r}: {error}. "
                'Hint: use "env://", "tcp://host:port" or "file:///path".'
            ) from error
        store.set_timeout(timeout)
        return store, rank, world_size, None
    return _C.rendezvous(
        init_method,
        rank=None if rank == -1 else rank,
        world_size=None if world_size == -1 else world_size,
        timeout=timeout,
    )


def _accelerator(device_id):
    """torch refuses a CPU device; scripts pass one to run on machines without CUDA.

    Raises:
        ArgumentError: a device that is not there.
    """
    if not isinstance(device_id, torch.device):
        return device_id
    if device_id.type == "cpu":
        return None
    count = torch.get_device_module(device_id).device_count()
    if (device_id.index or 0) >= count:
        raise ArgumentError(
            f"libddp: device_id is {device_id}, and this machine has {count} such devices. Hint: "
            "pass the number of the process on its host (LOCAL_RANK), or leave out device_id."
        )
    return device_id
