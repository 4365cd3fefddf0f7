"""Jobs that leave snapshots, for the tests of what looks at them."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import fsdp_models as models
import torch

import libddp

#: Moves a cursor, and has a line end.
ODD_NAME = "odd\x1b[2J\nname"
LONG = "x" * 5000


def build():
    """The model of `save`."""
    return models.build(lambda: models.TinyGpt(layers=1))


def save(folder):
    """One of two ranks: `folder`/run has steps 5 and 7, `folder`/old is of an earlier version."""
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    model = models.shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with contextlib.closing(libddp.Snapshot(f"{folder}/run", keep=3, linger=5)) as snapshot:
        for step in (5, 7):
            extra = {"step": step, "long": LONG, "list": list(range(1000)), ODD_NAME: 1}
            snapshot.save(step, model, optimizer, extra=extra, storage=True)
            snapshot.wait(60)
    if torch.distributed.get_rank() == 0:
        shutil.copytree(Path(__file__).parents[1] / "fsdp" / "old_snapshot", f"{folder}/old")
    destroy_process_group()


class OddModel(torch.nn.Module):
    """Parameters with odd names, and one with two."""

    def __init__(self):
        super().__init__()
        self.register_parameter(ODD_NAME, torch.nn.Parameter(torch.arange(6.0).view(2, 3)))
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight


def wait_until(condition, seconds=20):
    """Raises: AssertionError, it does not come true in that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
