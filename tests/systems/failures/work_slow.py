"""Training in which one rank becomes slow."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from failures.work import join


class Model(torch.nn.Module):
    """More than a small message; with a buffer, ranks also wait in the forward."""

    def __init__(self, has_buffer: bool):
        super().__init__()
        self.layer = torch.nn.Linear(128, 128)
        if has_buffer:
            self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        return self.layer(x)


def train(me, slow: int, begin: int, has_buffer: bool, num_steps: int, sleep_s: float) -> dict:
    """What its log and the model say; and of each step the times of this rank."""
    from libddp.nn.parallel import DistributedDataParallel

    dist = join(me)
    model = DistributedDataParallel(Model(has_buffer))
    came, began, ready, left, queued, named_in = [], [], [], [], [], None
    dist.barrier()
    for step in range(num_steps):
        if me.rank == slow and step >= begin:
            time.sleep(sleep_s)
        came.append(time.monotonic())
        model(torch.ones(4, 128)).sum().backward()
        times = model.timings()[-1]
        began.append(times.forward_begin_ns * 1e-9)
        ready.append(times.backward_end_ns * 1e-9)
        left.append(time.monotonic())
        queued.append(queued_s())
        if named_in is None and log_names(me, slow):
            named_in = step
    shares = model.wait_shares()
    dist.destroy_process_group()
    times = {"came": came, "began": began, "ready": ready, "left": left, "queued": queued}
    return times | {"named_in": named_in, "shares": shares}


def queued_s() -> float:
    """How long this process's threads have been ready to run but had no core."""
    tasks = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[1]) for task in tasks) * 1e-9


def log_names(me, slow: int) -> bool:
    """In this rank's output: one speaks for all."""
    output = (me.folder / f"output-{me.rank}").read_text(errors="replace")
    return "event=slow_rank " in output and f" slow_rank={slow} " in output
