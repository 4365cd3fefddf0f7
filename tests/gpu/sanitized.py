"""What compute-sanitizer looks at: each collective once, three steps of a small DDP and FSDP model.

compute-sanitizer --tool memcheck python tests/gpu/sanitized.py
"""
# ruff: noqa: E402 (the path comes before what is found on it)

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench")]

import subject
import torch
from subject import DDP, DEVICE, dist, fully_shard
from torch import nn


def collectives() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.ones(1000, 3, device=DEVICE, dtype=dtype)
        out = torch.zeros_like(tensor)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(out, tensor)
        dist.reduce_scatter_tensor(out, tensor, async_op=True).wait()
        dist.all_to_all_single(out, tensor, async_op=True).wait()
        assert out.eq(1).all()
    block = dist.allocate(1 << 16, device=DEVICE).fill_(2)
    dist.all_reduce(block)
    assert block.eq(2).all()
    dist.barrier()


def steps(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 32, device=DEVICE)).square().mean().backward()
        optimizer.step()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 33), nn.ReLU(), nn.Linear(33, 32)).to(DEVICE)


def main() -> None:
    subject.start()
    collectives()
    steps(DDP(network()))
    sharded = network()
    fully_shard(sharded)
    steps(sharded)
    subject.synchronize()
    subject.stop()
    print("fine")


if __name__ == "__main__":
    main()
