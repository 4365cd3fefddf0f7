"""World sizes other than two, sub-groups, and the ways to find each other."""

import os
import time

import pytest
import ranks
import torch

from libddp import distributed as ddp_dist


def exercise(world_size, init_method):
    if init_method is None:
        ddp_dist.init_process_group("gloo")
    else:
        ddp_dist.init_process_group(
            "gloo", init_method=init_method, rank=int(os.environ["RANK"]), world_size=world_size
        )
    rank = ddp_dist.get_rank()
    assert ddp_dist.get_world_size() == world_size
    tensor = torch.full((1000,), rank + 1.0)
    ddp_dist.all_reduce(tensor)
    assert tensor.eq(world_size * (world_size + 1) / 2).all()
    outputs = torch.empty(world_size, 3)
    ddp_dist.all_gather_into_tensor(outputs, torch.full((3,), float(rank)))
    assert outputs[:, 0].tolist() == list(range(world_size))
    share = torch.empty(2)
    ddp_dist.reduce_scatter_tensor(share, torch.arange(2.0 * world_size))
    assert share.tolist() == [world_size * 2 * rank, world_size * (2 * rank + 1)]
    names = [None] * world_size
    ddp_dist.all_gather_object(names, str(rank))
    assert names == [str(r) for r in range(world_size)]
    sub_groups(rank, world_size)
    ddp_dist.destroy_process_group()
    return rank


def sub_groups(rank, world_size):
    """Two groups side by side, ranks named globally."""
    halves = [list(range(0, world_size, 2)), list(range(1, world_size, 2))]
    groups = [ddp_dist.new_group(members) for members in halves if members]
    members, group = halves[rank % 2], groups[rank % 2]
    assert ddp_dist.native(group).global_ranks() == members
    tensor = torch.tensor([float(rank)])
    ddp_dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(members)
    tensor.fill_(rank)
    ddp_dist.broadcast(tensor, src=members[-1], group=group)
    assert tensor.item() == members[-1]
    outsider = (rank + 1) % 2
    if halves[outsider]:
        with pytest.raises(ValueError, match="not among the global ranks"):
            ddp_dist.broadcast(tensor, src=halves[outsider][0], group=group)
        with pytest.raises(ValueError, match="not a member"):
            ddp_dist.native(groups[outsider])


@pytest.mark.parametrize("world_size", [3, 4])
def test_world_sizes(world_size):
    assert ranks.run(exercise, world_size, world_size, None) == list(range(world_size))


def test_a_world_of_one(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert exercise(1, None) == 0


def test_a_file_is_a_meeting_place_and_is_removed(tmp_path):
    place = tmp_path / "meet"
    ranks.run(exercise, 2, 2, f"file://{place}")
    assert not place.exists()


def test_one_process_needs_no_store(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ddp_dist.init_process_group("gloo", rank=0, world_size=1)
    tensor = torch.ones(2)
    ddp_dist.all_reduce(tensor)
    ddp_dist.destroy_process_group()
    assert tensor.eq(1).all()


def test_a_store_of_the_users_own():
    store = torch.distributed.HashStore()
    for _ in range(2):  # a store may serve one group after the other
        ddp_dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        ddp_dist.barrier()
        ddp_dist.destroy_process_group()


def test_a_groups_end_leaves_nothing_behind():
    """Descriptors and threads of this process are as before."""

    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once():
        ddp_dist.init_process_group("gloo", rank=0, world_size=1)
        ddp_dist.all_reduce(torch.ones(10))
        ddp_dist.destroy_process_group()

    once()
    before = held()
    for _ in range(5):
        once()
    end = time.monotonic() + 30
    while held() > before and time.monotonic() < end:
        time.sleep(0.05)  # a thread that ends by itself
    assert held() <= before
