"""Transformers' Trainer: accumulation, clipping, recomputed blocks, a checkpoint, resuming."""

import os
from pathlib import Path

import results
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    """Not a multiple of what the ranks take at a time."""

    def __len__(self):
        return 61

    def __getitem__(self, index):
        tokens = torch.randint(50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(arguments: TrainingArguments) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    return Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def main():
    folder = Path(os.environ["RESULTS"]) / "checkpoints"
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        max_grad_norm=0.3,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer(arguments).train()
    first = min(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    resumed = trainer(arguments)
    resumed.train(resume_from_checkpoint=str(first))
    names = ("loss", "grad_norm", "eval_loss")
    losses = [line[name] for line in resumed.state.log_history for name in names if name in line]
    losses += [float(resumed.predict(Tokens()).metrics["test_loss"])]
    results.write(losses, resumed.model_wrapped)


if __name__ == "__main__":
    main()
