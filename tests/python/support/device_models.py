"""A small model, wrapped, on the CPU or on the fake device: the same numbers on both.

device = place("fakegpu")                # or "cpu"; after init_process_group
model = made(device)
model(batch(0)).pow(2).sum().backward()
"""

from __future__ import annotations

import fakegpu
import mock_nccl
import torch
from libddp.distributed import get_rank
from libddp.nn.parallel import DistributedDataParallel
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x, with_middle=True):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.middle(x)) if with_middle else x)


def place(kind):
    """The CPU, or this rank's fake device."""
    if kind == "cpu":
        return torch.device("cpu")
    fakegpu.load()
    mock_nccl.install()
    torch.fakegpu.set_device(get_rank())
    return torch.device("fakegpu", get_rank())


def made(device, **options):
    torch.manual_seed(3)
    ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(Net().to(device), device_ids=ids, bucket_cap_mb=0.001, **options)


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + get_rank())
    return torch.randn(6, 8, generator=generator)


def of_cpu(model):
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]
