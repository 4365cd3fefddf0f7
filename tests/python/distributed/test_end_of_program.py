"""Programs that end with messages in flight: they do not wait for the group's timeout."""

import pytest
from launches import finish, launch

_PROGRAM = """
import sys
import torch
import libddp.distributed as dist
rank, store, kind, end = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
peer = 1 - rank
kept = []
if kind in ("receives", "both"):
    kept.append(dist.irecv(torch.empty(4), peer, tag=1))
if kind in ("sends", "both"):
    kept.append(dist.isend(torch.ones(1 << 20), peer, tag=2))
if end == "destroyed":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["destroyed", "left"])
@pytest.mark.parametrize("kind", ["receives", "sends", "both"])
def test_ranks_end_although_nobody_takes_part(tmp_path, kind, end):
    """torch's process group over Gloo lets them end at once; the default timeout is 30 minutes."""
    arguments = [tmp_path / "store", kind, end]
    ranks = [launch(["-c", _PROGRAM, rank, *arguments], tmp_path) for rank in (0, 1)]
    assert finish(*ranks, deadline=60) == [(0, ""), (0, "")]
