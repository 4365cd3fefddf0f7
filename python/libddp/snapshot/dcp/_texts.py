"""Texts that ranks tell each other."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_texts(group, text: str) -> list[str]:
    """Those of all ranks, on all ranks; a collective of a C++ group, or None for this process."""
    if group is None or group.size() == 1:
        return [text]
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = torch.zeros(group.size(), dtype=torch.int64, device="cpu")
    sizes[group.rank()] = own.numel()
    group.all_reduce(sizes, op=dist.ReduceOp.SUM)
    told = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device="cpu")
    begin = int(sizes[: group.rank()].sum())
    told[begin : begin + own.numel()] = own
    group.all_reduce(told, op=dist.ReduceOp.SUM)
    return [part.numpy().tobytes().decode() for part in told.split(sizes.tolist())]
