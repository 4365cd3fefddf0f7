"""The way of the launch-and-forget DDP example: rendezvous through a file, or the environment."""

import argparse
import os

import results
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def demo_basic():
    torch.manual_seed(dist.get_rank())
    ddp_model = DDP(ToyModel(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results.write(losses, ddp_model)


def spmd_main(init_method):
    if init_method:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    assert dist.get_backend() == "gloo"
    demo_basic()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--init-method")
    spmd_main(parser.parse_args().init_method)
