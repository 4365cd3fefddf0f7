"""The training of goodput.py: with libddp.Snapshot in each step, or torch.save every so many.

python goodput_training.py '{"peer": "torch", "folder": "out", "pause": 0.1, "file_every": 20, ...}'
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from libddp.nn.parallel import DistributedDataParallel

import libddp


class LibddpSaves:
    """In memory, each step."""

    def __init__(self, config: dict, model, optimizer) -> None:
        self._parts = model, optimizer
        self._snapshot = libddp.Snapshot(os.path.join(config["folder"], "snapshots"), linger=10)

    def load(self) -> int:
        return self._snapshot.load(*self._parts).get("step", 0)

    def save(self, step: int) -> None:
        self._snapshot.save(step, *self._parts, extra={"step": step})


class TorchSaves:
    """In a file, by rank 0, every so many steps."""

    def __init__(self, config: dict, model, optimizer) -> None:
        self._path = os.path.join(config["folder"], "checkpoint.pt")
        self._every = config["file_every"]
        self._model, self._optimizer = model, optimizer

    def load(self) -> int:
        if not os.path.exists(self._path):
            return 0
        found = torch.load(self._path, weights_only=True)
        self._model.module.load_state_dict(found["model"])
        self._optimizer.load_state_dict(found["optimizer"])
        return found["step"]

    def save(self, step: int) -> None:
        if step % self._every or dist.get_rank() != 0:
            return
        state = {"model": self._model.module.state_dict(), "step": step}
        torch.save(state | {"optimizer": self._optimizer.state_dict()}, self._path + ".part")
        os.replace(self._path + ".part", self._path)


def build(config: dict):
    width = config["width"]
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    return DistributedDataParallel(model)


def main(config: dict) -> None:
    dist.init_process_group("libddp")
    rank = dist.get_rank()
    with open(os.path.join(config["folder"], f"pid-{rank}"), "w") as file:
        file.write(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saves = (TorchSaves if config["peer"] == "torch" else LibddpSaves)(config, model, optimizer)
    step = saves.load()
    log = os.open(
        os.path.join(config["folder"], "steps.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT
    )
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, config["width"])).square().mean().backward()
        optimizer.step()
        time.sleep(config["pause"])
        step += 1
        saves.save(step)
        if rank == 0:
            os.write(log, f"{time.monotonic():.6f} {step}\n".encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
