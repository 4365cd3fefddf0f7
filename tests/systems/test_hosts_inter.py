"""Several hosts whose collectives Gloo moves (inter="gloo"), with no variable set by the user."""

import pytest
import ranks
from host_ranks import launch, run
from network import Network
from test_hosts import check_collectives, check_messages, train

WITHOUT_NAMES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "", "LIBDDP_SOCKET_IFNAME": ""}


def everything_with_gloo_between():
    import libddp.distributed as dist
    import torch
    from libddp.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", inter="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    check_collectives(dist, rank, world)
    check_messages(dist, rank, world)
    many = torch.arange(20_000.0 * world) * (rank + 1)
    block = torch.empty(20_000)
    dist.reduce_scatter_tensor(block, many)
    dist.all_reduce(many)
    assert block.equal(many[20_000 * rank : 20_000 * (rank + 1)])
    half = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        many = torch.ones(50_000)
        dist.all_reduce(many, group=half)
        assert many.eq(2).all()
    check_engines_of_new_groups(dist, rank)
    mine = train(DistributedDataParallel, slice(rank, None, world))
    alone = train(lambda model: model, slice(None))
    difference = max((m - a).abs().max().item() for m, a in zip(mine, alone, strict=True))
    dist.destroy_process_group()
    return difference


def check_engines_of_new_groups(dist, rank):
    """A function makes the engine; an unknown name is refused on every rank alike."""
    import torch

    made = []

    def make(store, rank, world_size, address, timeout):
        made.append((rank, world_size, address))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(store, rank, world_size, options)

    group = dist.new_group(inter=make)
    many = torch.ones(30_000)
    dist.all_reduce(many, group=group)
    assert many.eq(dist.get_world_size()).all()
    assert made == [(rank // 2, 2, f"10.77.0.{rank // 2 + 1}")]
    with pytest.raises(ValueError, match="inter='smoke signals' is not known"):
        dist.new_group(inter="smoke signals")


def test_gloo_between_hosts():
    with Network(2) as net:
        differences = run(
            net, [0, 0, 1, 1], everything_with_gloo_between, env=lambda rank: WITHOUT_NAMES
        )
    assert max(differences) < 1e-5


def one_host_with_another_engine():
    import os
    from datetime import timedelta

    import libddp.distributed as dist

    inter = "gloo" if os.environ["RANK"] == "0" else None
    dist.init_process_group("gloo", timeout=timedelta(seconds=20), inter=inter)


def test_engines_that_differ_are_named():
    with Network(2) as net:
        outcomes = launch(net, [0, 1], one_host_with_another_engine)
    assert all(outcome.failed for outcome in outcomes)
    text = "\n".join(ranks.describe(outcome) for outcome in outcomes)
    for part in ("rank 0 (pid ", "inter=an engine'", "rank 1 (pid ", "inter=none'"):
        assert part in text, text
