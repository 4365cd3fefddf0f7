"""Sparse gradients of a model on the fake device: the numbers of the CPU.

The fake device makes sparse tensors, takes them apart, coalesces and adds them, which is what
gradients of nn.Embedding and SGD need. EmbeddingBag(sparse=True) and SparseAdam are not covered:
they need operators that it lacks.
"""

import contextlib

import fakegpu
import pytest
import ranks
import torch
from device_models import of_cpu, place
from libddp.distributed import get_rank, init_process_group
from libddp.nn.parallel import DistributedDataParallel
from torch import nn

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))

STEPS = 5
WORDS = 20


class Words(nn.Module):
    """Two sparse tables, of which one may stay unused, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True)
        self.more = nn.Embedding(WORDS, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, tokens, with_more=True):
        hidden = self.words(tokens).sum(1)
        if with_more:
            hidden = hidden + self.more(tokens).sum(1)
        return self.out(torch.tanh(hidden))


def tokens(step, device):
    """Repeated ones among them, and other ones on each rank."""
    generator = torch.Generator().manual_seed(10 * step + get_rank())
    return torch.randint(WORDS, (3, 5), generator=generator).to(device)


def trained(kind, options):
    init_process_group("gloo")
    device = place(kind)
    torch.manual_seed(1)
    model = DistributedDataParallel(Words().to(device), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(STEPS):
        optimizer.zero_grad()
        accumulates = model.no_sync() if step == 3 else contextlib.nullcontext()
        with accumulates:
            model(tokens(step, device)).pow(2).sum().backward()
        if step == 3:
            model(tokens(9, device)).pow(2).sum().backward()
        assert model.module.words.weight.grad.is_sparse
        optimizer.step()
        if options.get("find_unused_parameters"):
            optimizer.zero_grad()
            model(tokens(step, device), with_more=get_rank() == 0).pow(2).sum().backward()
            optimizer.step()
    if kind != "cpu":
        assert fakegpu.races() == []
    return of_cpu(model)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_sparse_gradients_give_the_bits_of_the_cpu(options):
    on_cpu, on_device = (ranks.run(trained, 2, kind, options) for kind in ("cpu", "fakegpu"))
    torch.testing.assert_close(on_device, on_cpu, rtol=0, atol=0)
