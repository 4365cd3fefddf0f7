"""examples/mingpt_ddp without Hydra and OmegaConf, by the same yaml file, with a small network.

    libddp run --nproc-per-node=1 tests/gpu/mingpt.py --text=FILE --device=cuda --amp=bfloat16

The last line is JSON: the device, and (train loss, test loss) of each epoch.
"""
# ruff: noqa: E402 (the path comes before what is found on it)

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import yaml

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/mingpt_ddp"
sys.path.insert(0, str(EXAMPLE))

import char_dataset
from model import GPT, GPTConfig
from ranks import join, leave
from trainer import OptimizerConfig, Trainer, TrainerConfig


def configured(text: str, device: str, amp: str):
    """The four sections, with what makes a run small."""
    given = yaml.safe_load((EXAMPLE / "gpt2_train_cfg.yaml").read_text())
    shape = given["gpt_config"] | {"n_layer": 2, "n_head": 2, "n_embd": 64}
    data = given["data_config"] | {"path": text, "block_size": 64, "truncate": 1.0}
    trainer = given["trainer_config"] | {
        "max_epochs": 2,
        "batch_size": 32,
        "device": device,
        "snapshot_path": "snapshot.pt",
        "use_amp": amp != "none",
        "amp_dtype": amp if amp != "none" else "bfloat16",
    }
    return (
        GPTConfig(**shape),
        OptimizerConfig(**given["optimizer_config"]),
        char_dataset.DataConfig(**data),
        TrainerConfig(**trainer),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--amp", default="none", choices=["none", "float16", "bfloat16"])
    asked = parser.parse_args()
    shape, optimizer, data, config = configured(asked.text, asked.device, asked.amp)
    train_set, test_set = char_dataset.load(data)
    ranks = join(config.device)
    torch.manual_seed(config.seed)
    shape = replace(shape, vocab_size=len(train_set.chars), block_size=data.block_size)
    trainer = Trainer(config, optimizer, GPT(shape), train_set, test_set, ranks)
    trainer.restore()
    losses = trainer.train()
    leave(ranks)
    print(json.dumps({"device": str(ranks.device), "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
