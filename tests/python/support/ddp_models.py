"""Small models for the DDP tests."""

import torch
import torch.distributed as dist
from torch import nn


def libddp_ddp():
    """libddp's class; imported on the ranks only."""
    from libddp.nn.parallel import DistributedDataParallel

    return DistributedDataParallel


def wrap(model=None, **arguments):
    """`model`, or an Mlp, under libddp's class."""
    return libddp_ddp()(Mlp() if model is None else model, **arguments)


def drop_in_ddp():
    """The class that libddp.install() puts in torch's place, which has torch's private names."""
    from libddp._torch_patches.ddp.distributed import DistributedDataParallel

    return DistributedDataParallel


def wrap_in_torchs_place(model=None, **arguments):
    """As `wrap`, under the class of the drop-in."""
    return drop_in_ddp()(Mlp() if model is None else model, **arguments)


def is_equal_on_all_ranks(tensor) -> bool:
    """The same answer on every rank, so that what follows is the same too."""
    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    same = torch.tensor(int(torch.equal(first, tensor)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


_gloo = None


def gloo():
    """A Gloo group over all ranks, for torch's own DDP; made by the first call, on every rank."""
    global _gloo
    if _gloo is None:
        _gloo = dist.new_group(backend="gloo")
    return _gloo


class TiedLanguageModel(nn.Module):
    """Embedding, one layer, and a head that shares the embedding's weight."""

    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        logits = self.head(self.layer(self.embedding(tokens)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return logits, loss


class ConvNet(nn.Module):
    """Convolution with batch norm: buffers of two dtypes, parameters of odd layouts."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 2)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, images):
        return self.out(torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3)))


class Heads(nn.Module):
    """A trunk and three heads, of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.trunk(x)))


class Mlp(nn.Module):
    """A few layers; `frozen` of them do not train."""

    def __init__(self, layers=4, width=16, frozen=0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
