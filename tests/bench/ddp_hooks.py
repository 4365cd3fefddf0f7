"""What a gradient costs under DDP: 1000 tiny parameters, one rank, one thread.

    python tests/bench/ddp_hooks.py [rounds]

Bare autograd, libddp and torch's DDP (plain and with bucket views) take turns in one process. One
JSON line per candidate; `us_per_parameter` is the CPU time that a step costs above bare autograd
(difference of the minima, so that a busy machine disturbs it little).
"""

import os
import sys

import pairing
import torch
import torch.distributed as dist
from torch import nn

PARAMETERS = 1000


class Many(nn.Module):
    """A sum of products with 1000 parameters of four elements each."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(PARAMETERS))

    def forward(self, x):
        return torch.stack([x * weight for weight in self.weights]).sum()


def step(model):
    x = torch.randn(4)

    def run():
        model.zero_grad(set_to_none=True)
        model(x).backward()

    return run


def candidates() -> dict:
    from libddp.distributed import init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("libddp")
    gloo = dist.new_group(backend="gloo")

    def torch_ddp(**arguments):
        return step(nn.parallel.DistributedDataParallel(Many(), process_group=gloo, **arguments))

    return {
        "bare": step(Many()),
        "libddp": step(DistributedDataParallel(Many())),
        "libddp find_unused": step(DistributedDataParallel(Many(), find_unused_parameters=True)),
        "torch": torch_ddp(),
        "torch bucket view": torch_ddp(gradient_as_bucket_view=True),
        "torch static graph": torch_ddp(gradient_as_bucket_view=True, static_graph=True),
        "torch find_unused": torch_ddp(gradient_as_bucket_view=True, find_unused_parameters=True),
    }


def main() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    lines = pairing.compare(candidates(), rounds=rounds, repeat=3, warmup=3, case="hooks")
    for line in lines:
        line["us_per_parameter"] = (line["cpu_min_s"] - lines[0]["cpu_min_s"]) / PARAMETERS * 1e6
        pairing.emit(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
