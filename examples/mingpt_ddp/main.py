"""Trains a minGPT-style character model. Only the imports from libddp differ from a torch script.

python main.py data_config.path=book.txt trainer_config.snapshot_path=s3://bucket/book.pt
libddp run --nproc-per-node=2 main.py trainer_config.max_epochs=3
torchrun --nproc-per-node=4 main.py

Every key of gpt2_train_cfg.yaml can be overridden on the command line (Hydra); `--cfg job` shows
what a run would use.
"""

import os
from dataclasses import replace

import char_dataset
import hydra
import settings
import torch
from errors import reported
from model import GPT
from omegaconf import DictConfig
from ranks import join, leave
from trainer import Trainer


@hydra.main(version_base="1.3", config_path=".", config_name="gpt2_train_cfg")
def main(cfg: DictConfig) -> None:
    # Hydra shortens tracebacks and ends the process itself; errors of a rank shall stay whole.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with reported("main.py"):
        run(settings.read(cfg))


def run(config: settings.Config) -> list[tuple[float, float]]:
    """Train as configured; return (train loss, test loss) of each epoch. Raises: UserError."""
    # The text comes first: if it is no good, no rank has to wait for another one.
    train_set, test_set = char_dataset.load(config.data_config)
    ranks = join(config.trainer_config.device)
    torch.manual_seed(config.trainer_config.seed)
    shape = replace(
        config.gpt_config,
        vocab_size=len(train_set.chars),
        block_size=config.data_config.block_size,
    )
    trainer = Trainer(
        config.trainer_config, config.optimizer_config, GPT(shape), train_set, test_set, ranks
    )
    trainer.restore()
    losses = trainer.train()
    leave(ranks)
    return losses


if __name__ == "__main__":
    main()
