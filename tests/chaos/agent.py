"""torch's own agent, as torchrun has it, with workers that it forks."""

from __future__ import annotations

import ctypes
import os

import train
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_SET_PDEATHSIG = 1  # of prctl(2)


def main(argument: dict) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=argument["ranks"],
        run_id=f"chaos-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=argument["restarts"],
        monitor_interval=0.05,
        start_method="fork",
        local_addr="localhost",
    )
    elastic_launch(config, worker)(argument["training"])


def worker(training: dict) -> None:
    # A program that torchrun starts does not hear of its agent's death from the kernel.
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, 0, 0, 0, 0)
    train.main(training)
