"""Sharded models in losses with gradients of their outputs: what DistributedDataParallel gives.

torch's FSDP raises there, as the memory of the parameters is gone when autograd comes to them first
in the second pass.
"""

import double_backward
import pytest
import ranks
import torch


def start(hosts):
    """With `hosts` each rank is on a host of its own, where units are gathered."""
    if hosts:
        ranks.live_apart()
    from libddp.distributed import get_rank, init_process_group

    init_process_group()
    return get_rank()


def faces():
    from libddp.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({double_backward.Block})
    return (
        lambda model: FullyShardedDataParallel(model, auto_wrap_policy=policy),
        lambda model: double_backward.shard(model, fully_shard),
        lambda model: double_backward.shard(model, fully_shard, use_dtensor=False),
        lambda model: double_backward.shard(model, fully_shard, reshard_after_forward=False),
    )


def as_without_sharding(hosts, recomputes):
    rank = start(hosts)
    from libddp.distributed import destroy_process_group
    from libddp.nn.parallel import DistributedDataParallel

    def train(wrap, loss):
        model = wrap(double_backward.build(recomputes))
        return double_backward.train(model, loss, rank)

    for loss in double_backward.LOSSES:
        wanted = train(DistributedDataParallel, loss)
        assert len(set(wanted)) == len(wanted)
        for wrap in faces():
            assert train(wrap, loss) == pytest.approx(wanted, rel=1e-4), loss.__name__
    destroy_process_group()


@pytest.mark.parametrize("recomputes", double_backward.PARTS)
@pytest.mark.parametrize("hosts", [False, True], ids=["shared", "gathered"])
def test_as_without_sharding(hosts, recomputes):
    ranks.run(as_without_sharding, 2, hosts, recomputes)


def has_memory(storage):
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # torch hands out no null
        return False


def memory_between_passes():
    rank = start(hosts=True)
    import torch
    from libddp.distributed import destroy_process_group

    for wrap in faces():
        model = wrap(double_backward.build())
        seen = []
        for module in model.modules():
            if isinstance(module, double_backward.Block):
                module.up.register_forward_hook(
                    lambda m, *_, seen=seen: seen.append(m.weight.detach().untyped_storage())
                )

        def is_there(seen=seen):
            return [has_memory(storage) for storage in seen[-3:]]

        x = torch.full((6, 4), 1.0 + rank, requires_grad=True)
        y = model(x)
        slope = double_backward.gradient(y, x)
        assert is_there() == [True] * 3
        (slope.pow(2).mean() + y.mean()).backward()
        assert is_there() == [False] * 3
        # A graph that nobody uses.
        double_backward.gradient(model(x), x)
        assert is_there() == [True] * 3
        with torch.no_grad():
            model(x)
        assert is_there() == [False] * 3
    destroy_process_group()


def test_the_memory_stays_until_the_second_pass_or_the_next_step():
    ranks.run(memory_between_passes, 2)


def of_gradients_alone(hosts):
    rank = start(hosts)
    from libddp.distributed import destroy_process_group
    from libddp.nn.parallel import DistributedDataParallel

    def slopes(model, x):
        return double_backward.gradient(model(x), x).pow(2).mean()

    def slopes_of_all(model, x):  # what no gradient reaches counts as zeros
        y = model(x)
        return double_backward.gradient(y, x).pow(2).mean() + 0 * y.sum()

    model = DistributedDataParallel(double_backward.build())
    wanted = double_backward.train(model, slopes_of_all, rank)
    for wrap in faces():
        got = double_backward.train(wrap(double_backward.build()), slopes, rank)
        assert got == pytest.approx(wanted, rel=1e-4)
    destroy_process_group()


@pytest.mark.parametrize("hosts", [False, True], ids=["shared", "gathered"])
def test_a_loss_of_gradients_alone(hosts):
    ranks.run(of_gradients_alone, 2, hosts)


class Heads(double_backward.Block):
    """Of the parameter that it needs each of two ranks has one row, which fits to everything."""

    def forward(self, x):
        hidden = torch.tanh(x)
        hidden.register_hook(self.keep)
        return torch.sin(hidden.unflatten(1, (2, -1)) * self.heads).flatten(1)

    def keep(self, grad):
        self.kept = grad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Heads(8)])

    def forward(self, x):
        return self.blocks[0](x)


def at_gradients_of_hooks(hosts):
    start(hosts)
    from libddp.distributed import destroy_process_group

    for wrap in faces():
        net = Net()
        kept_by, model = net.blocks[0], wrap(net)
        x = torch.ones(4, 8, requires_grad=True) * 2
        double_backward.gradient(model(x), x)
        with pytest.raises(RuntimeError, match=r"is at version 2147483648; expected version"):
            kept_by.kept.sum().backward()
    destroy_process_group()


@pytest.mark.parametrize("hosts", [False, True], ids=["shared", "gathered"])
def test_a_second_pass_that_finds_parts_of_parameters_is_refused(hosts):
    ranks.run(at_gradients_of_hooks, 2, hosts)
