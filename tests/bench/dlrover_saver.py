"""DLRover's DdpCheckpointer for the ranks of a benchmark, with the process that its agent would be.

    with dlrover_saver.Saver("name", folder) as checkpointer:  # on each rank
        checkpointer.save_checkpoint(1, state, storage_type=StorageType.MEMORY)

The agent's part runs in a process of its own on local rank 0, as under dlrover-run; what it leaves
in shared folders is removed. Ranks agree by gloo (`comm_backend`): with another backend DLRover
takes the default group's tensors for CUDA's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

AGENT = """
from dlrover.trainer.torch.flash_checkpoint.engine import start_async_save
start_async_save()
"""


def why_not() -> str:
    """In this interpreter; "" where it is installed."""
    try:
        import dlrover.trainer.torch.flash_checkpoint.ddp  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Saver:
    """Of one job, whose memory goes with it. All ranks make it, and give it the same name."""

    def __init__(self, name: str, folder: str) -> None:
        self._run_id = f"libddp-bench-{os.environ['MASTER_PORT']}-{name}"
        self._folder = folder
        variables = {"TORCHELASTIC_RUN_ID": self._run_id, "ROLE_NAME": "dlrover-trainer"}
        os.environ |= variables | {"GROUP_WORLD_SIZE": "1"}
        self._agent: subprocess.Popen | None = None

    def __enter__(self):
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        if os.environ["LOCAL_RANK"] == "0":
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._agent = subprocess.Popen([sys.executable, "-c", AGENT], **quiet)
        return DdpCheckpointer(self._folder, comm_backend="gloo")

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            dist.barrier()  # all have done with the agent
        if self._agent is None:
            return
        self._agent.kill()
        self._agent.wait()
        shutil.rmtree(Path("/tmp/ckpt_sock", self._run_id), ignore_errors=True)
        for left in Path("/dev/shm").glob(self._run_id + "*"):
            left.unlink()
