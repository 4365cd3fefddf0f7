"""The training that all rows of the failure table hurt: small, with everything that a resumed step
depends on (dropout, AdamW, a schedule, the place in the data).

    python train.py '{"mode": "ddp", "folder": "out/run", "log": "out/log", "steps": 100}'

It writes what it does to LOG/rank-R.txt, a line with one write each, behind the number of this
start of the job and the time (monotonic): "pid PID", "resumed STEP SECONDS", "step STEP LOSS",
"saving STEP", "saved STEP STALL", "copied STEP", "failed TEXT", "wrong TEXT", "ended". STEP counts
finished steps.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from libddp.distributed.fsdp import FullyShardedDataParallel
from libddp.nn.parallel import DistributedDataParallel

import libddp

DEFAULTS = {
    "mode": "ddp",  # or fsdp, plain
    "folder": None,
    "start": 0,
    "steps": 40,
    "width": 32,
    "pause": 0.0,  # a step takes so much longer
    "store_every": 0,
    "keep": 2,
    "linger": 20.0,
    "replicas": 0,
    "init": "env://",
    "data_workers": 0,
    "block_mib": 0,  # of further state in each rank
    "die": None,  # {"step": 3, "part": 17, "ranks": [0]}: in 17/64 of the copying of the block
    "save_first": False,  # before the first step, when the optimizer has no state
    "is_saved": True,
    "wait_at_end": False,
    "memory_mib": 0,  # what the control group allows the process, as far as it reads
}
BATCH, EXAMPLES = 4, 4096


class Examples(torch.utils.data.Dataset):
    """Rows that their number makes."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self._width, generator=torch.Generator().manual_seed(index))


class Places(torch.utils.data.Sampler):
    """Where the data goes on; the sampler's place is what the training says it is."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.position = rank, world, 0

    def __iter__(self):
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(5)).tolist()
        position = self.position
        while True:
            yield order[(position + self.rank) % EXAMPLES]
            position += self.world


class Log:
    """Lines that are whole, whenever the process dies."""

    def __init__(self, folder: str, rank: int, start: int) -> None:
        path = os.path.join(folder, f"rank-{rank}.txt")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._start = start

    def write(self, what: str, *values) -> None:
        line = " ".join(str(value) for value in values).replace("\n", " | ")
        left = f"{self._start} {time.monotonic():.6f} {what} {line}\n".encode()
        while left:  # the kernel may stop at the end of a page
            left = left[os.write(self._file, left) :]


class Block:
    """State of this rank alone, in pages of its own: one of them can be made deadly to read."""

    def __init__(self, mib: int) -> None:
        self._memory = mmap.mmap(-1, max(mib << 20, mmap.PAGESIZE))
        self.tensor = torch.frombuffer(self._memory, dtype=torch.float32)

    def poison(self, part: int) -> None:
        """The process dies of what copies `part`/64 of it."""
        size = self.tensor.numel() * 4
        offset = size * part // 64 // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.c_void_p(self.tensor.data_ptr() + offset)
        if ctypes.CDLL(None, use_errno=True).mprotect(address, mmap.PAGESIZE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


def build(mode: str, width: int) -> torch.nn.Module:
    layers = [
        layer
        for _ in range(3)
        for layer in (torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.2))
    ]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(width), torch.nn.Linear(width, 8))
    if mode == "ddp":
        return DistributedDataParallel(model)
    return FullyShardedDataParallel(model) if mode == "fsdp" else model


class Training:
    """One start of the job in one rank."""

    def __init__(self, config: dict) -> None:
        self.config = DEFAULTS | config
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        start = self.config["start"] + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.log = Log(self.config["log"], self.rank, start)
        self.step = 0
        self.log.write("pid", os.getpid())

    def run(self) -> None:
        self._meet()
        torch.manual_seed(17)
        self.model = build(self.config["mode"], self.config["width"])
        torch.manual_seed(100 + self.rank)  # of the dropout
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.block = Block(self.config["block_mib"])
        self.places = Places(self.rank, self.world)
        self.snapshot = self._snapshot()
        self._resume()
        if self.config["save_first"] and self.step == 0:
            self._save()
        loader = torch.utils.data.DataLoader(
            Examples(self.config["width"]),
            batch_size=BATCH,
            sampler=self.places,
            num_workers=self.config["data_workers"],
            generator=torch.Generator(),  # else each iterator draws a number of the dropout's
        )
        batches = iter(loader)
        while self.step < self.config["steps"]:
            self._train(next(batches))
            self._save()
        self._finish()

    def _meet(self) -> None:
        torch.set_num_threads(1)
        init, ranks = self.config["init"], {}
        if init != "env://":
            ranks = {"rank": self.rank, "world_size": self.world}
        if self.config["mode"] != "plain":
            dist.init_process_group("libddp", init_method=init, **ranks)

    def _snapshot(self):
        if not self.config["is_saved"]:
            return None
        options = {key: self.config[key] for key in ("folder", "keep", "linger", "replicas")}
        return libddp.Snapshot(**options)

    def _resume(self) -> None:
        if self.snapshot is None:
            return
        began = time.monotonic()
        extra = self.snapshot.load(self.model, self.optimizer, schedule=self.schedule)
        self.step = extra.get("step", 0)
        self.places.position = extra.get("position", 0)
        if "block" in extra:
            found = extra["block"].unique().tolist()
            if found != [float(self.step)]:
                self.log.write("wrong", f"block of step {self.step} holds {found[:8]}")
        self.log.write("resumed", self.step, time.monotonic() - began)

    def _train(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.places.position += BATCH * self.world
        if self.config["pause"]:
            time.sleep(self.config["pause"])
        self.log.write("step", self.step, loss.item().hex())

    def _save(self) -> None:
        if self.snapshot is None:
            return
        extra = {"step": self.step, "position": self.places.position}
        if self.config["block_mib"]:
            extra["block"] = self.block.tensor.fill_(self.step)
        every, die = self.config["store_every"], self.config["die"]
        is_stored = bool(every) and self.step % every == 0
        self.log.write("saving", self.step)
        if die and die["step"] == self.step and self.rank in die["ranks"]:
            self.block.poison(die["part"])
        report = self.snapshot.save(
            self.step,
            self.model,
            self.optimizer,
            extra=extra,
            storage=is_stored,
            schedule=self.schedule,
        )
        self.log.write("saved", self.step, report.stall)
        if self.config["replicas"]:
            self.log.write("copied", self._copied())

    def _copied(self) -> int:
        """The newest step of the host before this one that has come here."""
        slots = [slot for kept in self.snapshot.status()["replicas"] for slot in kept["slots"]]
        return max((slot.get("step", 0) for slot in slots), default=0)

    def _finish(self) -> None:
        if self.snapshot is not None and self.config["wait_at_end"]:
            try:
                self.snapshot.wait(20)
            except (libddp.SnapshotError, TimeoutError) as error:
                self.log.write("unstored", type(error).__name__, error)
        if self.snapshot is not None:
            self.snapshot.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.log.write("ended")


def pretend_limit(mib: int) -> None:
    """This process, in a mount namespace of its own, reads of such a limit of its control group,
    of which nothing is used. Needs root, and a group of version 2 at the root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    private, new_mounts = 1 << 14 | 1 << 18, 0x00020000  # MS_REC | MS_PRIVATE, CLONE_NEWNS
    if libc.unshare(new_mounts) != 0 or libc.mount(None, b"/", None, private, None) != 0:
        raise OSError(ctypes.get_errno(), "a mount namespace")
    if libc.mount(b"tmpfs", b"/sys/fs/cgroup", b"tmpfs", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "a mount")
    for name, number in (("memory.max", mib << 20), ("memory.current", 0)):
        with open(f"/sys/fs/cgroup/{name}", "w") as file:
            print(number, file=file)


def main(config: dict) -> None:
    """One rank; RANK and WORLD_SIZE are in the environment."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if config.get("memory_mib"):
        pretend_limit(config["memory_mib"])
    live(config)


@libddp.elastic.run
def live(config: dict) -> None:
    """Until it ends, or another rank does (`libddp run --in-place`)."""
    training = Training(config)
    try:
        training.run()
    except BaseException as error:
        training.log.write("failed", type(error).__name__, error)
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
