"""Trains a small character-level GPT whose processes may leave and come at any time.

    libddp run --nproc-per-node=2 --max-restarts=3 --preload train_elastic.py --max_steps=200

Kill what you like while it runs: each start goes on from the newest snapshot that is whole.
`touch OUT_DIR/stop` ends it behind the next step. `--help` lists the keys.

A step's batch is cut into PARTS, whose data and dropout follow from seed, step and part, and which
the ranks share. With two parts a gradient is the same sum of two, whoever computes them: the
training is the same, bit for bit, on one rank, on two, and after each change between them.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from libddp.distributed import (
    broadcast,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)
from libddp.nn.parallel import DistributedDataParallel as DDP
from shared import GPT, Corpus, GPTConfig, UserError, at_least, key, parse, prepare, run_script

import libddp


@dataclass
class ElasticSettings:
    out_dir: str = key("out/elastic", "folder of text, snapshots and steps.jsonl; all ranks see it")
    data: str = key("", "your text: a path or fsspec URL; empty: Python's own standard library")
    max_steps: int = key(200, "steps to train")
    snapshot_every: int = key(1, "steps between snapshots in memory")
    snapshot_storage: int = key(50, "steps between those in OUT_DIR/snapshots too")
    replicas: int = key(
        0, "1: the next host's memory has a copy of each snapshot (needs a run key)"
    )
    linger: float = key(30.0, "seconds for which the memory waits for the next start")
    parts: int = key(2, "parts of a step's batch, shared by all ranks")
    batch_size: int = key(8, "sequences per part")
    n_layer: int = key(2, "transformer blocks")
    n_head: int = key(4, "attention heads per block")
    n_embd: int = key(64, "width; a multiple of n_head")
    block_size: int = key(64, "characters of context")
    dropout: float = key(0.1, "share of activations dropped in training")
    learning_rate: float = key(1e-3, "of AdamW")
    seed: int = key(1337, "of weights, data order and dropout")


class Training:
    """Of one rank, in one start of the job. Thread rule: one thread."""

    def __init__(self, settings: ElasticSettings):
        self.settings, self.out = settings, Path(settings.out_dir)
        self.corpus = Corpus(prepare(settings.data, self.out / "data", 0.5), settings.block_size)
        init_process_group("libddp")
        self.rank, self.world = get_rank(), get_world_size()
        if settings.parts % self.world:
            raise UserError(
                f"--parts={settings.parts} cannot be shared by {self.world} ranks: it must be a "
                f"multiple of {self.world}"
            )
        torch.manual_seed(settings.seed)
        shape = {name: getattr(settings, name) for name in ("n_layer", "n_head", "n_embd")}
        config = GPTConfig(
            vocab_size=len(self.corpus.chars),
            block_size=settings.block_size,
            dropout=settings.dropout,
            **shape,
        )
        self.model = DDP(GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        self.snapshot = libddp.Snapshot(
            self.out / "snapshots", replicas=settings.replicas, linger=settings.linger
        )
        #: The same on all ranks, and another one in each start.
        self.start = common(os.getpid())
        # One write for each line, so that lines of several processes stay whole.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self.steps = os.open(self.out / "steps.jsonl", flags, 0o644)

    def run(self) -> None:
        extra = self.snapshot.load(self.model, self.optimizer)
        step = extra.get("step", 0)
        while step < self.settings.max_steps and not self.is_asked_to_stop():
            losses = self.train(step)
            step += 1
            self.note(step, losses)
            stored = step % self.settings.snapshot_storage == 0
            if stored or step % self.settings.snapshot_every == 0:
                self.save(step, stored)
        self.save(step, stored=True)
        self.snapshot.wait()
        self.snapshot.close()
        if self.rank == 0:
            (self.out / "stop").unlink(missing_ok=True)  # it has done its work
            print(f"trained {step} steps", flush=True)
        destroy_process_group()

    def save(self, step: int, stored: bool) -> None:
        done = {"step": step}
        self.snapshot.save(step, self.model, self.optimizer, extra=done, storage=stored)

    def train(self, step: int) -> dict[int, float]:
        """One step; return the loss of each part that is this rank's."""
        share = self.settings.parts // self.world
        losses = {}
        for part in range(self.rank * share, (self.rank + 1) * share):
            draw = (self.settings.seed, step, part)
            x, y = self.corpus.batch("train", draw, self.settings.batch_size)
            torch.manual_seed(mixed(*draw))  # of the dropout
            is_last = len(losses) == share - 1  # parts are summed here, and reduced with the last
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                loss = self.model(x, y)[1]
                (loss / share).backward()
            losses[part] = loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def note(self, step: int, losses: dict[int, float]) -> None:
        """In steps.jsonl: the step is done on this rank; losses with every bit of a float32."""
        line = {"time": time.monotonic(), "start": self.start, "pid": os.getpid()}
        line |= {"rank": self.rank, "world": self.world, "step": step}
        line["losses"] = {part: loss.hex() for part, loss in losses.items()}
        os.write(self.steps, json.dumps(line).encode() + b"\n")

    def is_asked_to_stop(self) -> bool:
        """Rank 0 looks, so that all ranks leave behind the same step."""
        return bool(common(int((self.out / "stop").exists())))


def common(number: int) -> int:
    """Rank 0's, on all ranks."""
    told = torch.tensor([number])
    broadcast(told, src=0)
    return int(told)


def mixed(*numbers: int) -> int:
    """A seed of its own for each combination."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def main(arguments: list[str]) -> int:
    settings = parse(ElasticSettings, arguments)
    for name in ("max_steps", "snapshot_every", "snapshot_storage", "parts", "batch_size"):
        at_least(settings, name, 1)
    torch.set_num_threads(1)
    Training(settings).run()
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "train_elastic.py"))
