"""Every call of libddp.distributed over a Gloo group that from_c10d wrapped, against numpy."""

import inspect
from datetime import timedelta

import checks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from in_place_group import InPlace
from launches import finish, launch
from torch.distributed import ReduceOp

WORLD = 3
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # torch 2.15


def begin():
    from libddp import distributed as ddp_dist

    dist.init_process_group("gloo")
    ddp_dist.from_c10d()


def api():
    from libddp import distributed as ddp_dist

    return ddp_dist


def inputs(dtype=np.float32, count=1000):
    return [((np.arange(count) * (r + 3)) % 7 + 1).astype(dtype) for r in range(WORLD)]


def own(arrays):
    return torch.from_numpy(arrays[dist.get_rank()].copy())


def check_who_and_where():
    group = api().from_c10d()
    assert group is api().native() is api().from_c10d(group) is api().native(dist.group.WORLD)
    assert (group.rank(), group.size()) == (dist.get_rank(), WORLD)
    assert group.backend_name() == "c10d:gloo"
    assert api().get_backend() == "gloo"
    assert api().allocate(3, 4).shape == (3, 4)
    assert group.timeout == timedelta(minutes=30)


def check_a_class_that_has_no_name():
    class Nameless(InPlace):  # as torchft's, before they are registered
        @property
        def group_name(self):
            raise ValueError("ProcessGroup name not set")

    assert api().from_c10d(Nameless(dist.group.WORLD)).size() == dist.get_world_size()


def check_a_registered_name_with_a_colon():
    from libddp.distributed import _backend

    dist.Backend.register_backend("mine:part", lambda *_: None, devices=["cpu"])
    assert _backend.choose("mine:part") == _backend.Choice("mine:part", "mine:part")


def check_all_reduce():
    ops = {
        ReduceOp.SUM: np.sum,
        ReduceOp.MAX: np.max,
        ReduceOp.MIN: np.min,
        ReduceOp.PRODUCT: np.prod,
        ReduceOp.AVG: np.mean,
    }
    for dtype in (np.float32, np.float64, np.float16, np.int8, np.uint8, np.int16, np.int64):
        for op, expected in ops.items():
            if op == ReduceOp.AVG and not np.issubdtype(dtype, np.floating):
                continue
            if op == ReduceOp.PRODUCT and dtype in (np.int8, np.uint8):
                continue
            arrays = inputs(dtype)
            tensor = own(arrays)
            api().all_reduce(tensor, op)
            wanted = expected(np.stack(arrays).astype(np.float64), axis=0).astype(dtype)
            tolerance = 2e-3 if dtype == np.float16 else 1e-6
            assert np.allclose(tensor.numpy(), wanted, rtol=tolerance), (dtype, op)
    for op, expected in (
        (ReduceOp.BAND, np.bitwise_and),
        (ReduceOp.BOR, np.bitwise_or),
        (ReduceOp.BXOR, np.bitwise_xor),
    ):
        arrays = inputs(np.int32)
        tensor = own(arrays)
        work = api().all_reduce(tensor, op, async_op=True)
        work.wait()
        assert np.array_equal(tensor.numpy(), expected.reduce(arrays))


def check_premultiplied_sum():
    tensor = torch.full((5,), 2.0)
    api().all_reduce(tensor, dist._make_nccl_premul_sum(dist.get_rank() + 1.0))
    assert tensor.eq(2 * (1 + 2 + 3)).all()


def check_complex_and_strided():
    tensor = torch.full((4, 3), dist.get_rank() + 1j, dtype=torch.complex64)[:, ::2]
    api().all_reduce(tensor)
    assert tensor.eq(3 + 3j).all()


def check_reduce_and_broadcast():
    arrays = inputs()
    tensor = own(arrays)
    api().reduce(tensor, dst=1)
    expected = np.sum(arrays, axis=0) if dist.get_rank() == 1 else arrays[dist.get_rank()]
    assert np.array_equal(tensor.numpy(), expected)
    for dtype in (torch.float32, torch.bool, torch.int16, torch.bfloat16, torch.complex128):
        sent = torch.full((9,), dist.get_rank(), dtype=dtype)
        api().broadcast(sent, src=2)
        assert sent.eq(torch.full((9,), 2, dtype=dtype)).all()


def check_gathers():
    arrays = inputs()
    gathered = torch.empty(WORLD * 1000)
    api().all_gather_into_tensor(gathered, own(arrays))
    assert np.array_equal(gathered.numpy(), np.concatenate(arrays))
    outputs = [torch.empty(rank + 1) for rank in range(WORLD)]
    api().all_gather(outputs, torch.full((dist.get_rank() + 1,), float(dist.get_rank())))
    assert all(output.eq(rank).all() for rank, output in enumerate(outputs))


def check_reduce_scatter():
    arrays = inputs()
    whole = torch.from_numpy(np.concatenate(arrays))
    block = torch.empty(1000)
    for op, factor in ((ReduceOp.SUM, WORLD), (ReduceOp.AVG, 1)):
        api().reduce_scatter_tensor(block, whole, op)
        assert np.allclose(block.numpy(), arrays[dist.get_rank()] * factor)
    parts = [torch.full((rank + 2,), 1.0) for rank in range(WORLD)]
    uneven = torch.empty(dist.get_rank() + 2)
    api().reduce_scatter(uneven, parts)
    assert uneven.eq(WORLD).all()


def check_all_to_all():
    outputs = [torch.empty(4) for _ in range(WORLD)]
    api().all_to_all(outputs, [torch.full((4,), dist.get_rank() * 10.0 + r) for r in range(WORLD)])
    assert [o[0].item() for o in outputs] == [r * 10 + dist.get_rank() for r in range(WORLD)]
    rank = dist.get_rank()
    sizes = [rank + r for r in range(WORLD)]  # rows between two ranks: the same both ways
    output = torch.empty(sum(sizes), 2)
    api().all_to_all_single(output, torch.full((sum(sizes), 2), float(rank)), sizes, sizes)
    assert output[:, 0].tolist() == [float(r) for r in range(WORLD) for _ in range(sizes[r])]


def check_messages():
    rank = dist.get_rank()
    following, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    got = torch.empty(7)
    if rank == 0:
        api().send(torch.full((7,), float(rank)), following, tag=5)
        assert api().recv(got, before, tag=5) == before
    else:
        assert api().recv(got, None, tag=5) == before
        api().send(torch.full((7,), float(rank)), following, tag=5)
    assert got.eq(before).all()


def check_barriers_and_objects():
    """What is torch's own goes to Gloo itself, in the order of the calls."""
    api().barrier()
    api().barrier(async_op=True).wait()
    api().barrier(timeout=timedelta(seconds=30))
    api().monitored_barrier(timeout=timedelta(seconds=30))
    objects = [None] * WORLD
    api().all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": rank} for rank in range(WORLD)]
    one = torch.ones(1)
    works = [api().all_reduce(one, async_op=True), dist.all_reduce(one.clone(), async_op=True)]
    for work in works:
        work.wait()
    assert one.item() == WORLD


def check_futures():
    tensor = torch.ones(3)
    future = api().all_reduce(tensor, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] + 1).wait().eq(WORLD + 1).all()


def check_sparse():
    native = api().native()
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (6,))
    native.all_reduce_sparse(tensor)
    assert tensor.to_dense().tolist() == [1, 1, 1, 0, 0, 6]


def check_sub_groups():
    part = dist.new_group([0, 2], backend="gloo")
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not a member"):
            api().from_c10d(part)
        return
    group = api().from_c10d(part)
    assert group.global_ranks() == [0, 2]
    for handle in (group, part):
        tensor = torch.full((2,), dist.get_rank() + 1.0)
        api().all_reduce(tensor, group=handle)
        assert tensor.eq(4).all()
        api().broadcast(tensor, src=2, group=handle)
        api().barrier(group=handle)
    turned = group.split([1, 0], "turned")
    assert turned.global_ranks() == [2, 0]
    assert turned.backend_name() == "c10d:gloo"
    tensor = torch.full((2000,), dist.get_rank() + 1.0)
    turned.all_reduce(tensor)
    assert tensor.eq(4).all()


def check_new_group_of_a_wrapped_group():
    rank = dist.get_rank()
    part = api().new_group([0, 1])
    if rank == 2:
        assert part == dist.GroupMember.NON_GROUP_MEMBER
    else:
        assert api().native(part).backend_name() == "c10d:gloo"
        assert api().native(part).global_ranks() == [0, 1]
        tensor = torch.full((2000,), rank + 1.0)
        api().all_reduce(tensor, group=part)
        dist.all_reduce(tensor, group=part)
        assert tensor.eq(6).all()


def check_split_group_of_a_wrapped_group():
    rank = dist.get_rank()
    for _ in range(2):
        part = api().split_group(split_ranks=[[2, 0], [1]])
        native = api().native(part)
        assert native.backend_name() == "c10d:gloo"
        assert native.global_ranks() == ([1] if rank == 1 else [2, 0] if KEEPS_ORDER else [0, 2])
        tensor = torch.full((2000,), rank + 1.0)
        api().all_reduce(tensor, group=part)
        assert tensor.eq(2 if rank == 1 else 4).all()
    if rank != 1:
        alone = api().split_group(part, split_ranks=[[1]])
        if dist.get_rank(part) == 1:
            assert api().native(alone).global_ranks() == [rank]
        else:
            assert alone is (dist.GroupMember.NON_GROUP_MEMBER if KEEPS_ORDER else None)
    dist.barrier()


def check_bad_arguments():
    with pytest.raises(ValueError, match="from_c10d: 3 is a int"):
        api().from_c10d(3)
    with pytest.raises(ValueError, match="AVG is not defined"):
        api().all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.AVG)


results, test_over_gloo = checks.suite(globals(), WORLD, begin=begin)


def test_without_a_default_group():
    from libddp.distributed import from_c10d

    with pytest.raises(RuntimeError, match="not initialised"):
        from_c10d()


_ENDS = """
import sys

import torch
import torch.distributed as dist
from libddp.distributed import all_reduce, from_c10d

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
group = from_c10d()
work = group.recv(torch.ones(4), 1 - rank, tag=3, async_op=True)  # which nobody sends
all_reduce(torch.ones(4), group=group)
dist.destroy_process_group()
"""


def test_a_program_ends_whatever_its_wrapper_waits_for(tmp_path):
    """By itself: one of the wrapper's threads waits until Gloo's timeout, and holds a tensor."""
    ranks = [launch(["-c", _ENDS, rank, tmp_path / "store"], tmp_path) for rank in (0, 1)]
    for status, output in finish(*ranks, deadline=60):
        assert status == 0, output
