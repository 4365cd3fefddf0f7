"""A script without a launcher, or a notebook: one process, which is a group of its own."""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist

from libddp.errors import ArgumentError

#: One of them means that somebody has begun to describe a group.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: How many processes those have started that set none of these.
_STARTERS = {
    "SLURM_NTASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun",
}


def is_alone(init_method: str | None, rank: int, world_size: int) -> bool:
    """Whether nothing says that there are other processes.

    Raises:
        ArgumentError: a variable says so, but not which one this is.
    """
    if init_method not in (None, "env://") or (rank, world_size) != (-1, -1):
        return False
    if any(name in os.environ for name in _LAUNCHERS):
        return False
    for variable, starter in _STARTERS.items():
        if os.environ.get(variable, "1") != "1":
            raise ArgumentError(
                f"libddp: {variable}={os.environ[variable]}, so {starter} has started several "
                "processes, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set: each "
                "would train by itself. Hint: let it start one `libddp run` per host, or set these "
                "variables in the job script."
            )
    return True


def rendezvous() -> tuple[dist.Store, int, int]:
    """(store, rank, world_size) of a group of one; says so."""
    warnings.warn(
        "libddp: no launcher has set RANK and WORLD_SIZE, so this process is a group of one. Hint: "
        "start several with `libddp run --nproc-per-node=N script.py`.",
        stacklevel=5,
    )
    return dist.HashStore(), 0, 1
