"""Collectives, messages and DDP over several hosts: equal to numpy, and to one process."""

import pytest
from host_ranks import run
from network import Network


def inputs(world, count):
    import numpy as np

    return [(np.arange(count) * (r + 3) % 17 - 8).astype(np.float32) for r in range(world)]


def check_collectives(dist, rank, world):
    import numpy as np
    import torch

    for count in (1, 1000, 50_000):
        arrays = inputs(world, count)
        own = torch.from_numpy(arrays[rank].copy())
        total = np.sum(arrays, axis=0)

        reduced = own.clone()
        dist.all_reduce(reduced)
        assert np.array_equal(reduced.numpy(), total)
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert np.array_equal(largest.numpy(), np.max(arrays, axis=0))
        gathered = torch.empty(world * count)
        dist.all_gather_into_tensor(gathered, own)
        assert np.array_equal(gathered.numpy(), np.concatenate(arrays))
        block = torch.empty(count)
        dist.reduce_scatter_tensor(block, torch.from_numpy(np.concatenate(arrays)))
        assert np.array_equal(block.numpy(), arrays[rank] * world)
        sent = own.clone() if rank == world - 1 else torch.empty(count)
        dist.broadcast(sent, src=world - 1)
        assert np.array_equal(sent.numpy(), arrays[-1])
        outputs = [torch.empty(count) for _ in range(world)]
        dist.all_to_all(outputs, [own] * world)
        assert all(np.array_equal(o.numpy(), a) for o, a in zip(outputs, arrays, strict=True))
        dist.barrier()


def check_messages(dist, rank, world):
    import torch

    following, before = (rank + 1) % world, (rank - 1) % world
    for count in (1, 100_000):
        got = torch.empty(count)
        works = [
            dist.irecv(got, before, tag=3),
            dist.isend(torch.full((count,), float(rank)), following, tag=3),
        ]
        for work in works:
            work.wait()
        assert got.eq(before).all()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]


def train(wrap, rows):
    """A few steps on these rows of a fixed data set; the parameters after them."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    )
    data = torch.randn(4, 24, 8)
    target = torch.randn(4, 24, 1)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in zip(data, target, strict=True):
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def everything():
    import libddp.distributed as dist
    import torch
    from libddp.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    check_collectives(dist, rank, world)
    check_messages(dist, rank, world)
    half = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        one = torch.ones(3)
        dist.all_reduce(one, group=half)
        assert one.eq(2).all()
    mine = train(DistributedDataParallel, slice(rank, None, world))
    alone = train(lambda model: model, slice(None))
    # Each host's rows are summed in another order than one process sums them.
    difference = max((m - a).abs().max().item() for m, a in zip(mine, alone, strict=True))
    dist.destroy_process_group()
    return difference


@pytest.mark.parametrize(
    ("hosts", "ipv6"),
    [
        ([0, 0, 1, 1], False),
        ([0, 1, 2], True),
        ([0, 0, 0, 1], False),
        ([0, 0, 1, 2], False),
        ([0, 0, 1, 1, 2, 2, 3, 3], False),
    ],
    ids=["2x2", "3x1-ipv6", "3+1", "2+1+1", "4x2"],
)
def test_everything_over_hosts(hosts, ipv6):
    with Network(max(hosts) + 1, ipv6=ipv6) as net:
        assert max(run(net, hosts, everything)) < 1e-5


def choose_links():
    """bf16 and two sockets by argument, also for a later group; another group takes it back."""
    import libddp.distributed as dist
    import torch

    def is_rounded(group):
        sum_of_two = torch.arange(20_000.0)
        dist.all_reduce(sum_of_two, group=group)
        difference = (sum_of_two - 2 * torch.arange(20_000.0)).abs().max().item()
        assert difference <= 40_000 / 128
        return difference > 0

    dist.init_process_group("gloo", wire_dtype=torch.bfloat16, sockets_per_link=2)
    found = [is_rounded(None), is_rounded(dist.new_group())]
    found.append(is_rounded(dist.new_group(wire_dtype=torch.float32, sockets_per_link=1)))
    found.append(is_rounded(dist.new_group()))
    dist.destroy_process_group()
    return found


def test_each_group_chooses_how_it_uses_the_links():
    with Network(2) as net:
        for found in run(net, [0, 1], choose_links):
            assert found == [True, True, False, True]
