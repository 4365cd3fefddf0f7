"""Blocks to checkpoint, and what a training step over them gives."""

from __future__ import annotations

import functools

import torch
from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from libddp.utils.checkpoint import (
    checkpoint,
    checkpoint_module,
    create_selective_checkpoint_contexts,
)
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two residual branches with dropout, as in a transformer, without attention."""

    def __init__(self, width: int = 8, dropout: float = 0.3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, scale: float = 1.0):
        return x + scale * self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks, each called by `call(block, x)`."""

    def __init__(self, depth: int = 3, call=None, width: int = 8, dropout: float = 0.3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.call = call or (lambda block, x: block(x))

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


class TwoHeads(nn.Module):
    """The first block is called twice, and one of two heads stays unused if `unused`."""

    def __init__(self, unused: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(1 + unused))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads[0](self.blocks[0](x))


def train(model, input_grad: bool = False) -> list[torch.Tensor]:
    """Weights after three steps; each rank has numbers of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3 + torch.distributed.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8, requires_grad=input_grad)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def step(model, seed: int = 1, width: int = 8) -> list[torch.Tensor]:
    """Output, the gradients of input and parameters, and the next random number."""
    torch.manual_seed(seed)
    x = torch.randn(4, width, requires_grad=True)
    out = model(x)
    out.pow(2).mean().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return [out.detach(), *(g.clone() for g in gradients), torch.rand(2)]


def assert_equal(ours: list, theirs: list) -> None:
    """To the bit."""
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


_PRODUCTS = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
)
#: name -> function(block, x)
FORMS = {
    "own graph": functools.partial(checkpoint, use_reentrant=False),
    "early stop where it pays": functools.partial(checkpoint, use_reentrant=False, early_stop=None),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "module": checkpoint_module,
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=_PRODUCTS),
}


def wrap(model: nn.Module, form: str, classes=Block) -> None:
    """Checkpoints each module of `classes` within the model."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_fn=FORMS[form])
    apply_activation_checkpointing(model, wrapper, lambda m: isinstance(m, classes))
