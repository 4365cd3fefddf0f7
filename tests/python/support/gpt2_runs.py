"""Runs of examples/gpt2_fsdp with a tiny network: alone in this process, or on several ranks.

LIBDDP_TEST_ENGINE=libddp runs them with another engine than the example's default.
"""

import json
import os
import signal
from pathlib import Path

import numpy as np
from example_modules import load

TINY = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=16",
    "--batch_size=2",
    "--gradient_accumulation_steps=6",
    "--learning_rate=1e-2",
    "--warmup_iters=2",
    "--lr_decay_iters=10",
    "--eval_interval=5",
    "--eval_iters=5",
    "--log_interval=1",
    "--save_interval=1000",
    "--device=cpu",
    *(f"--engine={name}" for name in [os.environ.get("LIBDDP_TEST_ENGINE")] if name),
]
VOCABULARY = 50


def example():
    return load("gpt2_fsdp")


def prepare(folder: Path) -> Path:
    """What convert.py would write for a text whose words follow each other in a fixed order."""
    tokens = (np.arange(20_000) * 7 % VOCABULARY).astype(np.uint16)
    meta = {"format": 1, "origin": {"source": "test"}, "dtype": "uint16", "end_of_text": 0}
    meta |= {"vocab_size": VOCABULARY, "tokenizer": {"kind": "no", "words": "none"}}
    for split, part in (("train", tokens[:18_000]), ("val", tokens[18_000:])):
        part.tofile(folder / f"{split}.bin")
        meta[f"{split}_tokens"] = len(part)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def train(data: Path, out: Path, *more: str, stop_at: int | None = None) -> int:
    """Exit status of train_fsdp.py; with `stop_at`, SIGTERM comes in that iteration."""
    modules = example()
    trainer = modules.fsdp_trainer.FsdpTrainer
    original = trainer.step

    def step(self):
        if self.iteration == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    trainer.step = step
    try:
        return modules.train_fsdp.main([*TINY, f"--data_dir={data}", f"--out_dir={out}", *more])
    finally:
        trainer.step = original


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[tuple]:
    """Iteration, training loss and validation loss of each line."""
    return [(r["iter"], r.get("loss"), r.get("val_loss")) for r in lines(out)]
