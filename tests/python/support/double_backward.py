"""Losses with gradients of the model's own output in them: autograd goes through its graph twice.

model = shard(Net(), fully_shard)
losses = train(model, critic, rank)
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Autograd keeps views of the linear layers' weights, and the other parameters themselves."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.slopes = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.heads = nn.Parameter(torch.tensor([[0.5], [1.5]]))
        self.down = nn.Linear(width, width)

    def forward(self, x):
        hidden = torch.tanh(self.slopes * self.up(self.norm(x)))
        # One row for each of two ranks: part of it would fit to everything.
        heads = hidden.unflatten(1, (2, -1)) * self.heads
        return x + self.down(torch.sin(heads).flatten(1))


class Net(nn.Module):
    """`recomputes`: "" (nothing), "each" block by itself, or "all" blocks as one part."""

    def __init__(self, layers=3, width=8, recomputes=""):
        super().__init__()
        self.recomputes = recomputes
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        if self.recomputes == "all":
            return self.last(checkpoint(self.through_blocks, x, use_reentrant=False))
        return self.last(self.through_blocks(x))

    def through_blocks(self, x):
        each = self.recomputes == "each"
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if each else block(x)
        return x


def build(recomputes=""):
    torch.manual_seed(0)
    return Net(recomputes=recomputes)


def shard(model, fully_shard, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def gradient(outputs, inputs):
    """With a graph of its own."""
    return torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]


def penalty(model, x):
    y = model(x)
    return y.pow(2).mean() + gradient(y, x).pow(2).mean()


def critic(model, x):
    """Wasserstein's, with its gradient penalty between two batches."""
    real, fake = x.detach(), 2 * x.detach() + 1
    distance = model(fake).mean() - model(real).mean()
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    norm = gradient(model(between), between).norm(dim=1)
    return distance + 10 * (norm - 1).pow(2).mean()


def equation(model, x):
    """The residual of a differential equation of second order, and values at a boundary."""
    at_boundary = model(x.detach()[:2] + 1)
    y = model(x)
    slopes = gradient(y, x)
    second = sum(gradient(slopes[:, k], x)[:, k] for k in range(4))
    return (second + y.squeeze(1)).pow(2).mean() + at_boundary.pow(2).mean()


def forward_between(model, x):
    """Between the two passes the model computes something else."""
    slope = gradient(model(x), x)
    return slope.pow(2).mean() + model(2 * x.detach()).pow(2).mean()


def sensitivity(model, x):
    """No graph of the gradients: autograd goes through this one once, and through another."""
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    return (model(x.detach()) - slope.sum(1, keepdim=True)).pow(2).mean()


LOSSES = (penalty, critic, equation, forward_between, sensitivity)
#: What Net recomputes.
PARTS = ("", "each", "all")


def train(model, loss_of, rank, device="cpu", steps=3):
    """The losses, on the host. `loss_of`: one of LOSSES."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 4, generator=draw).to(device).requires_grad_()
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
