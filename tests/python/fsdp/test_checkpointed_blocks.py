"""Activation checkpointing around blocks of which a part is a unit of its own, frozen or not."""

import itertools

import checks
import fsdp_models as models
import torch
from libddp.utils.checkpoint import checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint


class Lora(nn.Module):
    """A frozen linear layer and what is trained beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        adapted = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return nn.functional.linear(x, self.weight) + adapted


class Scale(nn.Module):
    """Its weight has as many rows as there are ranks, so that those of one could be broadcast."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 1)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight + self.bias


class Net(nn.Module):
    def __init__(self, part, replay):
        super().__init__()
        self.stem, self.part, self.head = nn.Linear(4, 4), part, nn.Linear(4, 8)
        self._replay = replay

    def block(self, x):
        return self.head(torch.relu(self.part(x)))

    def forward(self, x):
        return self._replay(self.block, self.stem(x))


def losses(make, frozen, num_forwards, replay, **options):
    torch.manual_seed(0)
    net = Net(make(), replay)
    for name in frozen:
        net.part.get_parameter(name).requires_grad_(False)
    fully_shard = models.libddp_fsdp().fully_shard
    fully_shard(net.part, **options)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = sum(net(torch.randn(2, 4)).square().mean() for _ in range(num_forwards))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def replayed(call, **options):
    return lambda block, x: call(block, x, **options)


PARTS = (
    (lambda: nn.LayerNorm(4), ("bias",)),
    (lambda: nn.LayerNorm(4), ("weight", "bias")),
    (lambda: nn.LayerNorm(4), ()),
    (lambda: nn.Linear(4, 4), ("weight",)),
    (Lora, ("weight",)),
    (Scale, ("weight",)),
)

HOW = (
    {"use_reentrant": True},
    {"use_reentrant": False},
    {"use_reentrant": False, "determinism_check": "none"},
)


def check_a_part_that_is_a_unit():
    for (make, frozen), num_forwards, reshards in itertools.product(PARTS, (1, 2), (True, False)):
        case = make, frozen, num_forwards
        expected = losses(*case, lambda block, x: block(x), reshard_after_forward=reshards)
        for call, how in itertools.product((checkpoint, torchs_checkpoint), HOW):
            found = losses(*case, replayed(call, **how), reshard_after_forward=reshards)
            assert found == expected, (frozen, num_forwards, reshards, call, how)


results, test_on_all_ranks = checks.suite(globals(), 2, apart=True)
