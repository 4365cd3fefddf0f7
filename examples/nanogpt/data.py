"""Reads what prepare.py wrote: memory-mapped tokens, batches, and the unigram baseline.

corpus = Corpus(folder, block_size=128)
x, y = corpus.batch("train", (1337, step), batch_size=12)    # int64 [12, 128]; y is x plus one
"""

import json
from pathlib import Path

import numpy as np
import torch
from config import UserError

SPLITS = ("train", "val")


class Corpus:
    """Thread rule: read-only after construction, so any thread may use it."""

    def __init__(self, folder: Path, block_size: int):
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.source: str = meta["origin"]["source"]
        self.chars: str = meta["chars"]
        self.block_size = block_size
        self.tokens = {}
        for split in SPLITS:
            count = meta[f"{split}_tokens"]
            if count <= block_size:
                raise UserError(
                    f"{self.source}: too short: {count} characters in the {split} part, "
                    f"--block_size={block_size} needs {block_size + 1}"
                )
            path = folder / f"{split}.bin"
            self.tokens[split] = np.memmap(path, dtype=meta["dtype"], mode="r")
            if len(self.tokens[split]) != count:
                raise UserError(
                    f"{path}: {len(self.tokens[split])} tokens instead of {count}; "
                    f"remove {folder / 'meta.json'} to prepare it again"
                )

    def batch(self, split: str, draw: tuple[int, ...], batch_size: int, device="cpu"):
        """Return inputs and targets at places that depend only on `draw`.

        So the global batch of an iteration is the same for any number of ranks, and a resumed run
        reads on where the interrupted one stopped without having saved anything.
        """
        tokens = self.tokens[split]
        random = np.random.default_rng((SPLITS.index(split), *draw))
        starts = random.integers(0, len(tokens) - self.block_size, size=batch_size)
        rows = tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        rows = torch.from_numpy(rows)
        if torch.device(device).type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def unigram_baseline(self) -> float:
        """Loss in nats of a model that knows only how often each character occurs in training.

        A network that does not beat this number has not learned to read. One is added to each
        count, so that a character which only the held-back text has costs much but not infinity.
        """
        counts = {split: self._counts(split) for split in SPLITS}
        seen = counts["train"] + 1
        surprise = -np.log(seen / seen.sum())
        return float((counts["val"] * surprise).sum() / counts["val"].sum())

    def _counts(self, split: str) -> np.ndarray:
        tokens, step = self.tokens[split], 1 << 24  # by parts: bincount widens to 8 bytes each
        parts = (tokens[at : at + step] for at in range(0, len(tokens), step))
        return sum(np.bincount(part, minlength=len(self.chars)) for part in parts)
