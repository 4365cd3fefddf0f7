"""torch.distributed's names on libddp's process group.

Swap the import: `from libddp.distributed import init_process_group, all_reduce, ...`. What is hot
or different is libddp's own; every other name is torch's function, which runs on the same group
through libddp's c10d backend (docs/api.md lists which is which). Names of torch.distributed that
are not imported here by name are found there.
"""

from __future__ import annotations

import torch.distributed as _torch
from torch.distributed import (
    Backend,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    FileStore,
    GroupMember,
    HashStore,
    P2POp,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    Store,
    TCPStore,
    Work,
    all_gather_object,
    broadcast_object_list,
    gather,
    gather_object,
    get_default_backend_for_device,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    irecv,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    isend,
    new_subgroups,
    new_subgroups_by_enumeration,
    recv_object_list,
    scatter,
    scatter_object_list,
    send_object_list,
)

from libddp.distributed._collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    allocate,
    barrier,
    batch_isend_irecv,
    broadcast,
    monitored_barrier,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    send,
)
from libddp.distributed._flight_log import flight_log
from libddp.distributed._from_c10d import from_c10d
from libddp.distributed._groups import native
from libddp.distributed._init import (
    destroy_process_group,
    get_backend,
    init_process_group,
    new_group,
    split_group,
)
from libddp.distributed._torch_modules import install as _find_torchs_modules
from libddp.distributed.device_mesh import DeviceMesh, init_device_mesh

_find_torchs_modules()

__all__ = [
    "Backend",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allocate",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "flight_log",
    "from_c10d",
    "gather",
    "gather_object",
    "get_backend",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "isend",
    "monitored_barrier",
    "native",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
]


def __getattr__(name: str):
    try:
        return getattr(_torch, name)
    except AttributeError:
        raise AttributeError(
            f"neither libddp.distributed nor torch.distributed has an attribute {name!r}"
        ) from None
