"""Runs a way of use under libddp's wrapper and under torch's own on Gloo, in the same processes.

def train(wrap):                              # the same code for both
    model = wrap(Mlp(), bucket_cap_mb=0.01)
    model(data(4)).sum().backward()
    return gradients(model)

compare(train)                                # every tensor equal, bit for bit

At two ranks the average does not depend on its order, so the two must agree to the bit in any
precision that can be halved exactly.
"""

import torch
import torch.distributed as dist
from ddp_models import gloo, libddp_ddp
from states import assert_same
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def ours(module, **options):
    return libddp_ddp()(module, **options)


def theirs(module, **options):
    options.setdefault("process_group", gloo())
    return TorchDDP(module, **options)


def seed() -> None:
    """Each rank has values of its own: that all start from rank 0's is up to the wrapper."""
    torch.manual_seed(17 + dist.get_rank())


def compare(case, *arguments):
    """`case(wrap, *arguments)` returns a nest of tensors and plain values; ours is returned."""
    results = []
    for wrap in (theirs, ours):
        seed()
        results.append(case(wrap, *arguments))
    assert_same(*reversed(results))
    return results[1]


def data(rows: int, width: int = 16, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, dtype=dtype)


def parameters(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def gradients(model) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_agree(tensors) -> None:
    """The ranks hold the same bits; called on every rank alike."""
    for tensor in tensors:
        mine = tensor.detach().clone()
        first = mine.clone()
        dist.broadcast(first, 0)
        equal = torch.tensor(int(torch.equal(mine, first)))
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        assert equal.item(), "the ranks differ"


def train(model, optimizer, steps=3, rows=4, width=16):
    """A few plain steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(data(rows, width)).pow(2).mean().backward()
        optimizer.step()
