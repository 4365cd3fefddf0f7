"""Puts libddp in torch's place for scripts that name only torch.

    import libddp; libddp.install()      # first lines of a script, before it imports torch's names
    libddp run --drop-in train.py        # nothing to edit
    LIBDDP_DROP_IN=1 python train.py     # whatever starts the processes

With the variable set, torch itself installs libddp at the end of `import torch`, through the entry
point in `libddp._autoload`. So nothing stands between the interpreter and the script, and processes
that the script starts (mp.spawn, subprocess) are treated alike. The table of libddp._torch_patches
says what is replaced, docs/drop_in.md also what is not.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from libddp._torch_backend import BACKEND
from libddp._torch_patches.replacing import DROP_IN


def install() -> None:
    """Makes torch's names for the process group, DDP and FSDP answer libddp's. Does so once.

    Replaced are `init_process_group`, `new_group` and `monitored_barrier` of torch.distributed (and
    distributed_c10d), `get_backend` of torch.distributed, and DistributedDataParallel of
    torch.nn.parallel (and its module `distributed`), activation checkpointing in
    torch.utils.checkpoint and torch's checkpoint_wrapper, and FullyShardedDataParallel and
    fully_shard of torch.distributed.fsdp. All of it on GPUs too. get_total_norm of torch.nn.utils
    knows sharded gradients, and the other ranks hear of exceptions in the loss's
    part of backward that a script catches. Every other function of torch.distributed stays torch's
    and runs on libddp's process group.

    Raises:
        StateError: a process group exists already, and it is not libddp's.
        ImportError: libddp's extension does not load; the message says why.

    Note:
        A name that a module imported from torch before keeps its old meaning there.

    Example:
        >>> import libddp, torch
        >>> libddp.install()
        >>> theirs = torch.nn.parallel.DistributedDataParallel
        >>> issubclass(theirs, libddp.nn.parallel.DistributedDataParallel)
        True
        >>> libddp.uninstall()
        >>> torch.nn.parallel.DistributedDataParallel.__module__
        'torch.nn.parallel.distributed'
    """
    if DROP_IN:
        return
    _refuse_foreign_group()
    from libddp._torch_patches import (
        activation_checkpointing,
        backward_engine,
        ddp,
        fsdp,
        process_group,
        total_norm,
    )

    for patch in (
        process_group,
        ddp,
        activation_checkpointing,
        fsdp,
        backward_engine,
        total_norm,
    ):
        patch.put(DROP_IN)


def uninstall() -> None:
    """Takes `install` back; without effect where nothing is installed.

    Models and groups that exist go on as they are. isinstance(model, torch's
    DistributedDataParallel) stays true for models of libddp's class.
    """
    DROP_IN.undo()


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
