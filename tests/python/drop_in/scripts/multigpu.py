"""The way of the DDP tutorial series without a launcher: torch.multiprocessing starts the ranks."""

import os
import sys

import results
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    init_process_group(backend="gloo", rank=rank, world_size=world_size)


def main(rank, world_size, total_epochs):
    ddp_setup(rank, world_size)
    torch.manual_seed(5)
    dataset = TensorDataset(torch.rand(61, 20), torch.rand(61, 1))
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    model = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    model, losses = DDP(model), []
    for epoch in range(total_epochs):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(source), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    results.write(losses, model)
    destroy_process_group()


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    mp.spawn(main, args=(world_size, 3), nprocs=world_size)
