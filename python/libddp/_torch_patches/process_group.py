"""Makes torch's names for groups libddp's: init_process_group, new_group, and what asks for names.

Replaces `init_process_group`, `new_group`, `monitored_barrier` and `batch_isend_irecv` of
torch.distributed and of distributed_c10d, `get_backend` of torch.distributed, and
`init_process_group` in torch.distributed.device_mesh. A backend of torch (libddp is one) needs its
own name passed, and unmodified scripts pass "gloo" and "nccl". The drop-in asks for it; undone by
uninstall.
"""

from __future__ import annotations

from libddp._torch_patches.replacing import Replacements


def put(replacements: Replacements) -> None:
    """All of them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from libddp.distributed import _collectives, _init

    for owner in (dist, c10d):
        replacements.put(owner, "init_process_group", _init.init_process_group)
        replacements.put(owner, "new_group", _init.new_group)
        replacements.put(owner, "monitored_barrier", _collectives.monitored_barrier)
        replacements.put(owner, "batch_isend_irecv", _collectives.batch_isend_irecv)
    # Meshes make the default group where there is none.
    replacements.put_after_import(
        "torch.distributed.device_mesh",
        lambda mesh: replacements.put(mesh, "init_process_group", _init.init_process_group),
    )
    # Not in c10d: torch asks itself there for the backend to build a group with.
    replacements.put(dist, "get_backend", _init.get_backend)
