"""Reads what convert.py wrote, and deals out windows of it in an order that can be resumed.

    corpus = Tokens(Path("out/data"))
    order = Order(corpus.count("train"), block_size=128, seed=1337)
    x, y = corpus.windows("train", order.take(4), 128)    # int64 [4, 128]; y is x moved by one
    order.state()                                         # {"samples": 4, "seed": 1337}

Each epoch deals out every window once, in an order and with an offset that follow from the seed and
the epoch. Which windows come next depends on how many have been dealt out and on nothing else, so a
run goes on with the same data on any number of ranks.
"""

import json
from pathlib import Path

import numpy as np
import torch
from shared import UserError

META = "meta.json"
SPLITS = ("train", "val")


class Tokens:
    """Thread rule: read-only after construction, so any thread may use it."""

    def __init__(self, folder: Path):
        self.meta = _read_meta(folder)
        self.vocab_size: int = self.meta["vocab_size"]
        self._tokens = {split: self._map(folder, split) for split in SPLITS}

    def _map(self, folder: Path, split: str) -> np.ndarray:
        path, count = folder / f"{split}.bin", self.meta[f"{split}_tokens"]
        if not count:
            return np.zeros(0, dtype=self.meta["dtype"])
        try:
            tokens = np.memmap(path, dtype=self.meta["dtype"], mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot read it: {error}; run convert.py again") from error
        if len(tokens) != count:
            raise UserError(
                f"{path}: {len(tokens)} tokens instead of {count}; run convert.py again"
            )
        return tokens

    def count(self, split: str) -> int:
        return len(self._tokens[split])

    def windows(self, split: str, starts: np.ndarray, block_size: int, device="cpu"):
        """Inputs and targets, int64 [len(starts), block_size] each."""
        places = starts[:, None] + np.arange(block_size + 1)
        rows = torch.from_numpy(self._tokens[split][places].astype(np.int64))
        if torch.device(device).type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def spread(self, split: str, count: int, block_size: int) -> np.ndarray:
        """`count` starts at equal distances: what an evaluation reads, the same each time."""
        return np.linspace(0, self.count(split) - block_size - 1, count).astype(np.int64)

    def check(self, block_size: int) -> None:
        """Raises: UserError if a part is too short for one window and an offset."""
        for split, least in (("train", 2 * block_size), ("val", block_size + 1)):
            if self.count(split) < least:
                raise UserError(
                    f"{self.meta['origin']['source']}: too short: {self.count(split)} tokens in "
                    f"the {split} part, --block_size={block_size} needs {least}"
                )


class Order:
    """Thread rule: one thread."""

    def __init__(self, tokens: int, block_size: int, seed: int):
        self._block, self._seed = block_size, seed
        self._count = (tokens - block_size) // block_size  # leaves room for the offset
        self._epoch, self._starts = -1, np.zeros(0, dtype=np.int64)
        self.samples = 0  # dealt out so far

    def take(self, count: int) -> np.ndarray:
        """The next `count` starts; a new epoch begins where one ends."""
        numbers = range(self.samples, self.samples + count)
        self.samples += count
        return np.array([self._start(*divmod(n, self._count)) for n in numbers], dtype=np.int64)

    def _start(self, epoch: int, place: int) -> int:
        if epoch != self._epoch:
            random = np.random.default_rng((self._seed, epoch))
            offset = random.integers(self._block)
            self._starts = offset + self._block * random.permutation(self._count)
            self._epoch = epoch
        return int(self._starts[place])

    def state(self) -> dict:
        return {"samples": self.samples, "seed": self._seed}

    def restore(self, state: dict) -> None:
        """Go on where state() was asked for. Raises: UserError if the seed is another one."""
        if state["seed"] != self._seed:
            raise UserError(
                f"--seed={self._seed}: the checkpoint's data order has seed {state['seed']}; give "
                "that one, or --init_from=scratch"
            )
        self.samples = state["samples"]


def _read_meta(folder: Path) -> dict:
    path = folder / META
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"--data_dir={folder}: there is no {META}; 'python convert.py --source=FOLDER "
            f"--data_dir={folder}' makes it"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read it: {error}; run convert.py again") from error
