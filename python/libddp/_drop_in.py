"""Puts libddp in torch's place for scripts that name only torch.

    import libddp; libddp.install()      # first lines of a script, before it imports torch's names
    libddp run --drop-in train.py        # nothing to edit
    LIBDDP_DROP_IN=1 python train.py     # whatever starts the processes

With the variable set, torch itself installs libddp at the end of `import torch`, through the entry
point in `libddp._autoload`. So nothing stands between the interpreter and the script, and processes
that the script starts (mp.spawn, subprocess) are treated alike. docs/drop_in.md says what is
replaced and what is not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib.metadata import entry_points

from libddp import _after_import, _drop_in_fsdp
from libddp._torch_backend import BACKEND

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_CHECKPOINT = "torch.utils.checkpoint"
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"
#: Modules of torch that work on the inside of torch's own DistributedDataParallel.
_KEEP_TORCH_DDP = ("torch._dynamo.convert_frame", "torch.distributed._composable.replicate")
_KEPT_DDP = (
    "libddp: this DistributedDataParallel is torch's own, with torch's reducer, on libddp's "
    "process group: its name was imported before libddp was installed. Hint: call "
    "libddp.install() before `from torch.nn.parallel import DistributedDataParallel`, or start "
    "the script with `libddp run --drop-in`."
)
_KEPT_FSDP = (
    "libddp: this FSDP is torch's own, on libddp's process group: its name was imported before "
    "libddp was installed, or there is CUDA, where libddp does not shard yet. Hint: on a machine "
    "without CUDA call libddp.install() before `from torch.distributed.fsdp import ...`, or start "
    "the script with `libddp run --drop-in`."
)
_ABSENT = object()
#: (owner, name, what stood there or _ABSENT), in the order of replacement
_replaced: list[tuple[object, str, object]] = []
#: what waits for a module of torch that is not imported yet
_pending: list[Callable] = []


def install() -> None:
    """Makes torch's names for the process group, DDP and FSDP answer libddp's. Does so once.

    Replaced are `init_process_group`, `new_group` and `monitored_barrier` of torch.distributed (and
    distributed_c10d), `get_backend` of torch.distributed, and DistributedDataParallel of
    torch.nn.parallel (and its module `distributed`), activation checkpointing in
    torch.utils.checkpoint and torch's checkpoint_wrapper, and, where there is no CUDA,
    FullyShardedDataParallel and fully_shard of torch.distributed.fsdp. Every other function of
    torch.distributed stays torch's and runs on libddp's process group.

    Raises:
        StateError: a process group exists already, and it is not libddp's.
        ImportError: libddp's extension does not load; the message says why.

    Note:
        A name that a module imported from torch before keeps its old meaning there.

    Example:
        >>> import libddp, torch
        >>> libddp.install()
        >>> torch.nn.parallel.DistributedDataParallel.__module__
        'libddp.nn.parallel.distributed'
        >>> libddp.uninstall()
        >>> torch.nn.parallel.DistributedDataParallel.__module__
        'torch.nn.parallel.distributed'
    """
    if _replaced:
        return
    _refuse_foreign_group()
    _replace_group()
    _replace_ddp()
    _call_after_import(_CHECKPOINT, _replace_checkpoint)
    _call_after_import(_WRAPPER, _replace_wrapper)
    _replace_fsdp()
    for module, name in ((_FSDP1, "FullyShardedDataParallel"), (_FSDP2, "FSDPState")):
        _call_after_import(module, lambda found, name=name: _announce(found, name, _KEPT_FSDP))


def uninstall() -> None:
    """Takes `install` back; without effect where nothing is installed.

    Models and groups that exist go on as they are. isinstance(model, torch's
    DistributedDataParallel) stays true for models of libddp's class.
    """
    _after_import.forget(_pending)
    _pending.clear()
    while _replaced:
        owner, name, former = _replaced.pop()
        if isinstance(owner, dict):  # sys.modules
            owner[name] = former
        elif former is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


def require_automatic() -> None:
    """Checks that LIBDDP_DROP_IN reaches the Python processes that this one starts.

    Raises:
        ArgumentError: torch there would not load libddp; the message says why.
    """
    from libddp.errors import ArgumentError

    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise ArgumentError(
            "libddp: --drop-in needs torch to load libddp, and TORCH_DEVICE_BACKEND_AUTOLOAD=0 "
            "forbids it. Hint: unset that variable, or call libddp.install() in the script."
        )
    if not any(e.name == BACKEND for e in entry_points(group="torch.backends")):
        raise ArgumentError(
            "libddp: --drop-in needs an installed libddp, and this one is only on the path: torch "
            "finds no entry point of it. Hint: `pip install .` in a checkout of libddp, or call "
            "libddp.install() in the script."
        )


def _refuse_foreign_group() -> None:
    import torch.distributed as dist

    from libddp.distributed._groups import find
    from libddp.errors import StateError

    if dist.is_initialized() and find() is None:
        raise StateError(
            "libddp: install() comes too late: torch's default process group exists already, on "
            f"backend {dist.get_backend()!r}. Hint: call it before init_process_group()."
        )


def _replace(owner: object, name: str, replacement: object) -> None:
    if isinstance(owner, dict):  # sys.modules
        _replaced.append((owner, name, owner[name]))
        owner[name] = replacement
        return
    _replaced.append((owner, name, getattr(owner, name, _ABSENT)))
    setattr(owner, name, replacement)


def _call_after_import(name: str, function: Callable) -> None:
    _pending.append(function)
    _after_import.call(name, function)


def _replace_group() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from libddp.distributed import _collectives, _init

    for owner in (dist, c10d):
        _replace(owner, "init_process_group", _init.init_process_group)
        _replace(owner, "new_group", _init.new_group)
        _replace(owner, "monitored_barrier", _collectives.monitored_barrier)
    # Meshes make the default group where there is none.
    _call_after_import(
        "torch.distributed.device_mesh",
        lambda mesh: _replace(mesh, "init_process_group", _init.init_process_group),
    )
    # Not in c10d: torch asks itself there for the backend to build a group with.
    _replace(dist, "get_backend", _init.get_backend)


def _replace_ddp() -> None:
    import torch.nn.parallel as parallel

    from libddp.nn.parallel import DistributedDataParallel as Ours

    theirs = parallel.distributed.DistributedDataParallel
    theirs.register(Ours)  # isinstance() in modules that hold torch's class already
    for owner in (parallel, parallel.distributed):
        _replace(owner, "DistributedDataParallel", Ours)
    _announce(parallel.distributed, theirs, _KEPT_DDP)
    for module in _KEEP_TORCH_DDP:
        _call_after_import(module, lambda m: _replace(m, "DistributedDataParallel", theirs))


def _replace_checkpoint(theirs) -> None:
    from libddp.utils import checkpoint as ours

    for name in (
        "checkpoint",
        "checkpoint_sequential",
        "create_selective_checkpoint_contexts",
    ):
        _replace(theirs, name, getattr(ours, name))


def _replace_wrapper(theirs) -> None:
    from libddp.distributed.algorithms._checkpoint import checkpoint_wrapper as ours

    for name in ("CheckpointWrapper", "checkpoint_wrapper", "apply_activation_checkpointing"):
        _replace(theirs, name, getattr(ours, name))


def _replace_fsdp() -> None:
    def after(module: str, function: Callable) -> None:
        _call_after_import(module, lambda found: function(found, _replace))

    after(_drop_in_fsdp.PACKAGE, _drop_in_fsdp.replace)
    for module in _drop_in_fsdp.COMPOSABLE:
        after(module, _drop_in_fsdp.replace_composable)
    after(_drop_in_fsdp.KEEPS_TORCHS, _drop_in_fsdp.keep_torchs)


def _announce(module, kind, text: str) -> None:
    """Objects of this class, given itself or by its name in `module`, are said to be torch's."""
    kind = getattr(module, kind) if isinstance(kind, str) else kind
    construct = kind.__init__

    @wraps(construct)
    def announce_and_construct(self, *args, **kwargs):
        _say(text)
        construct(self, *args, **kwargs)

    _replace(kind, "__init__", announce_and_construct)


@cache
def _say(text: str) -> None:
    """A warning, once in a process, and on one rank where the launcher tells ranks apart."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=3)
