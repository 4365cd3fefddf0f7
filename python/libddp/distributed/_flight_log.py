"""What the groups of this process did last, as data."""

from __future__ import annotations

import json
import os

import torch.distributed.distributed_c10d as c10d

from libddp._whole_file import write_text
from libddp.distributed import _groups


def flight_log(path: str | os.PathLike | None = None, group=None) -> dict:
    """The last 2,048 operations of each group: call, sequence, label, times, state; failures too.

    Always recorded; may be asked for at any time from any thread, also while an operation hangs or
    after a failure. docs/failures.md lists the fields.

    Args:
        path: also write it there, as JSON; readers see the whole file or none.
        group: only this one; None = all groups that are not destroyed.

    Returns:
        {"groups": [{"group", "rank", "failure", "operations": [...], ...}, ...]}

    Example:
        >>> from libddp.distributed import destroy_process_group, flight_log, init_process_group
        >>> from libddp.distributed import barrier
        >>> init_process_group("gloo", rank=0, world_size=1)
        >>> barrier()
        >>> flight_log()["groups"][0]["operations"][-1]["kind"]
        'barrier'
        >>> destroy_process_group()
    """
    if group is not None:
        groups = [_groups.native(group)]
    else:
        groups = [found for found in map(_groups.find, list(c10d._world.pg_map)) if found]
    log = {"groups": [json.loads(one.flight_log()) for one in groups]}
    if path is not None:
        write_text(path, json.dumps(log, indent=1))
    return log
