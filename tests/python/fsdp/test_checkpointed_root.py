"""Activation checkpointing around the outermost module that fully_shard was called on."""

import checks
import fsdp_models as models
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.inner(x))


def sharded(with_units, **options):
    torch.manual_seed(0)
    net = Net()
    package = models.libddp_fsdp()
    if with_units:
        package.fully_shard(net.inner)
    return package.fully_shard(net, **options)


def train(call, *nets):
    optimizer = torch.optim.AdamW([p for net in nets for p in net.parameters()], lr=0.1)
    losses = []
    for step in range(3):
        x = torch.linspace(-1, 1, 12).view(2, 6).add(step).requires_grad_()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_the_outermost_module():
    for with_units in (False, True):
        for options in ({}, {"reshard_after_forward": True}, {"use_dtensor": False}):
            plain = sharded(with_units, **options)
            expected = train(plain, plain)
            for reentrant in (False, True):
                net = sharded(with_units, **options)
                replayed = train(lambda x: checkpoint(net, x, use_reentrant=reentrant), net)  # noqa: B023
                assert replayed == expected, (with_units, options, reentrant)
            net = sharded(with_units, **options)
            assert train(checkpoint_wrapper(net), net) == expected


def check_two_outermost_modules_in_one_block():
    nets = sharded(True), sharded(True)
    expected = train(nn.Sequential(*nets), *nets)
    nets = sharded(True), sharded(True)
    both = nn.Sequential(*nets)
    assert train(lambda x: checkpoint(both, x, use_reentrant=False), *nets) == expected


results, test_on_two_ranks = checks.suite(globals(), 2)
