"""Ranks as children of multiprocessing: one raises, the other writes what it learns, and when.

Behind that both raise, and torch's parent shows the traceback of the one to blame.

python multiprocessing_ranks.py FOLDER      # FOLDER/{torch,spawn,fork}/{raised,learned}
"""

import json
import multiprocessing
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from libddp.errors import PeerError

from libddp import distributed as dist


def work(rank: int, folder: Path, raises: bool = False) -> None:
    # torch's parent ends the others as soon as one child has failed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    dist.barrier()
    if rank == 1:
        (folder / "raised").write_text(str(time.monotonic()))
        raise ValueError("no such shard")
    try:
        dist.all_reduce(torch.ones(1))
    except PeerError as error:
        learned = {"at": time.monotonic(), "text": str(error)}
        (folder / "learned").write_text(json.dumps(learned))
        if raises:
            raise


def spawn_torchs(folder: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="no such shard"):
        torch.multiprocessing.spawn(work, args=(folder,), nprocs=2)
    for again in range(2):
        (folder / str(again)).mkdir()
        with pytest.raises(torch.multiprocessing.ProcessRaisedException) as caught:
            torch.multiprocessing.spawn(work, args=(folder / str(again), True), nprocs=2)
        assert "Process 1 terminated" in str(caught.value)
        assert 'raise ValueError("no such shard")' in str(caught.value)


def start(method: str, folder: Path) -> None:
    context = multiprocessing.get_context(method)
    children = [context.Process(target=work, args=(rank, folder)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 1]


def main(folder: Path) -> None:
    for form in ("fork", "spawn", "torch"):
        (folder / form).mkdir()
        if form == "torch":
            spawn_torchs(folder / form)
        else:
            start(form, folder / form)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
