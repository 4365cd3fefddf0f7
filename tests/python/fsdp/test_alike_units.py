"""Ranks that run different units, which are alike: told so, never added to each other."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

#: Averaged together with others, and by themselves.
WIDTHS = (4, 200)


class Experts(nn.Module):
    """Two parts of the same shape; the caller chooses one."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(5)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def forward(self, x, choice):
        return self.head(self.experts[choice](x))


def by_hand(width):
    """The units have the name of their class only."""
    package, model = models.libddp_fsdp(), Experts(width)
    group = dist.new_group()
    for index, expert in enumerate(model.experts):
        model.experts[index] = package.FullyShardedDataParallel(expert, process_group=group)
    return package.FullyShardedDataParallel(model, process_group=group)


def by_policy(width):
    policy = ModuleWrapPolicy({nn.Linear})
    return models.wrap(Experts(width), auto_wrap_policy=policy, process_group=dist.new_group())


def by_fully_shard(width):
    fully_shard, model = models.libddp_fsdp().fully_shard, Experts(width)
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu")
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = (by_hand, by_policy, by_fully_shard)


def one_pass(model, width, choice):
    model(torch.ones(3, width), choice).sum().backward()


def check_ranks_that_choose_different_ones():
    from libddp.errors import PeerError

    for make in WAYS:
        for width in WIDTHS:
            model = make(width)
            one_pass(model, width, 1)
            with pytest.raises(PeerError, match="the ranks called different collectives") as error:
                one_pass(model, width, dist.get_rank())
            assert "unit 1 " in str(error.value) or "small units" in str(error.value)


def check_ranks_that_choose_the_same_one():
    for make in WAYS:
        for width in WIDTHS:
            plain, model = Experts(width), make(width)
            for step in range(3):
                one_pass(plain, width, step % 2)
                one_pass(model, width, step % 2)
            wanted = [p.grad for p in plain.parameters()]
            found = models.whole_gradients(model).values()
            for own, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(own, other)


results, test_on_two_ranks = checks.suite(globals(), 2)
