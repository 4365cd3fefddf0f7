"""A training with the calls of DLRover's nanogpt example: the same imports, names and order.

It notes which samples it trained on, and ends as if killed after --die_at steps.
"""

import argparse
import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset


class GPTDataset(Dataset):
    def __init__(self, size, block_size=8):
        self.data = torch.arange(size + block_size)
        self.block_size = block_size

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        x = self.data[idx : idx + self.block_size]
        return x, x + 1


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(200, 8)
        self.head = torch.nn.Linear(8, 200)

    def forward(self, data, target):
        logits = self.head(self.embedding(data))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        return logits, loss


def get_data_loaders(batch_size, num_workers):
    train_dataset, val_dataset = GPTDataset(53), GPTDataset(9)
    sampler = ElasticDistributedSampler(dataset=train_dataset)
    train_loader = ElasticDataLoader(
        train_dataset,
        batch_size=batch_size,
        sampler=sampler,
        pin_memory=True,
        num_workers=num_workers,
    )
    val_loader = ElasticDataLoader(
        val_dataset, batch_size=batch_size, shuffle=False, pin_memory=True
    )
    return train_loader, val_loader


def train(args):
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(1337 + dist.get_rank())
    train_loader, val_loader = get_data_loaders(args.batch_size, args.num_workers)
    model = DDP(GPT())
    print(f"Model device {model.device}")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    elastic_trainer = ElasticTrainer(model=model, dataloader=train_loader)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    optimizer = elastic_trainer.prepare(optimizer)
    total_steps = 0
    if os.path.exists(args.checkpoint):
        ckpt_dict = torch.load(args.checkpoint)
        model.load_state_dict(ckpt_dict["model"])
        optimizer.load_state_dict(ckpt_dict["optimizer"])
        train_loader.sampler.load_state_dict(ckpt_dict["sampler"])
        total_steps = ckpt_dict["step"]
    for epoch in range(train_loader.sampler.epoch, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + epoch)
        for data, target in train_loader:
            total_steps += 1
            with elastic_trainer.step():
                with contextlib.nullcontext():
                    _, loss = model(data, target)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            note(args, total_steps, epoch, data)
            if total_steps % args.save_interval == 0:
                save_checkpoint(args, model, optimizer, train_loader, total_steps)
            if total_steps == args.die_at:
                dist.barrier()
                os._exit(7)
    with torch.no_grad():
        print(f"validated on {sum(len(data) for data, _ in val_loader)}")
    dist.destroy_process_group()


def note(args, step, epoch, data):
    with open(f"{args.notes}-{dist.get_rank()}", "a") as file:
        file.write(f"{step} {epoch} {' '.join(map(str, data[:, 0].tolist()))}\n")


def save_checkpoint(args, model, optimizer, train_loader, steps):
    state_dict = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": steps,
        "sampler": train_loader.sampler.state_dict(steps, train_loader.batch_size),
    }
    if dist.get_rank() == 0:
        torch.save(state_dict, args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--notes", required=True)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--save_interval", type=int, default=2)
    parser.add_argument("--die_at", type=int, default=-1)
    train(parser.parse_args())
