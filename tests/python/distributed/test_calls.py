"""Every call of libddp.distributed on two ranks, straight and through torch's own functions."""

import os
import sys
import warnings
from collections import Counter
from datetime import timedelta

import checks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from libddp.distributed import _exit
from torch.distributed import ReduceOp

from libddp import distributed as ddp_dist

WORLD = 2


def rank():
    return ddp_dist.get_rank()


def both():
    """Our functions and torch's: the same group serves them."""
    return (ddp_dist, dist)


def check_who_and_where():
    assert (ddp_dist.get_world_size(), dist.get_world_size()) == (WORLD, WORLD)
    assert ddp_dist.get_backend() == "gloo"
    assert isinstance(ddp_dist.get_backend(), str)
    assert dist.get_backend() == "libddp"
    group = ddp_dist.native()
    assert (group.rank(), group.size(), group.name()) == (rank(), WORLD, "world")
    assert ddp_dist.native(ddp_dist.GroupMember.WORLD) is group
    assert ddp_dist.native(group) is group


def check_all_reduce():
    for api in both():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            tensor = torch.full((3, 5), rank() + 1, dtype=dtype)
            assert api.all_reduce(tensor) is None
            assert tensor.eq(3).all(), (api, dtype)
        for op, expected in (
            (ReduceOp.AVG, 1.5),
            (ReduceOp.MAX, 2),
            (ReduceOp.MIN, 1),
            (ReduceOp.PRODUCT, 2),
        ):
            tensor = torch.full((7,), rank() + 1.0)
            api.all_reduce(tensor, op=op)
            assert tensor.eq(expected).all(), (api, op)
        bits = torch.tensor([1 << rank()])
        api.all_reduce(bits, ReduceOp.BOR)
        assert bits.item() == 3


def check_all_reduce_of_odd_tensors():
    for api in both():
        scalar, empty = torch.tensor(float(rank())), torch.empty(0, 3)
        api.all_reduce(scalar)
        api.all_reduce(empty)
        assert scalar.item() == 1
        strided = torch.full((4, 6), float(rank()))[:, ::2]
        api.all_reduce(strided)
        assert strided.eq(1).all()
        pair = torch.full((3,), complex(rank(), 1))
        api.all_reduce(pair)
        assert pair.eq(complex(1, 2)).all()
        mask = torch.tensor([rank() == 0, False])
        api.all_reduce(mask, ReduceOp.MAX)
        assert mask.tolist() == [True, False]
        leaf = torch.ones(2, requires_grad=True)
        api.all_reduce(leaf.data)
        assert leaf.eq(2).all()


def check_sparse_all_reduce():
    for api in both():
        dense = torch.zeros(4, 2)
        dense[rank()] = 1
        dense[3] = 1
        tensor = dense.to_sparse()
        api.all_reduce(tensor)
        assert tensor.to_dense().tolist() == [[1, 1], [1, 1], [0, 0], [2, 2]]
        with pytest.raises(ValueError, match="unsupported reduction operation"):
            api.all_reduce(dense.to_sparse(), op=ReduceOp.MAX)


def check_async_works_and_futures():
    for api in both():
        tensors = [torch.full((100,), float(rank() + i)) for i in range(50)]
        works = [api.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert isinstance(works[0], dist.Work)
        works[-1].wait()
        for i, work in enumerate(works):
            work.wait()
            assert work.is_completed()
            assert tensors[i].eq(2 * i + 1).all()
        tensor = torch.ones(3)
        future = api.all_reduce(tensor, async_op=True).get_future()
        assert future.then(lambda f: f.value()[0] * 10).wait().tolist() == [20, 20, 20]


def check_a_future_callback_may_use_the_group():
    def again(future):
        tensor = future.value()[0]
        ddp_dist.all_reduce(tensor)
        return tensor

    work = ddp_dist.all_reduce(torch.ones(2), async_op=True)
    assert work.get_future().then(again).wait().tolist() == [4, 4]


def check_rooted_calls():
    for api in both():
        for root in range(WORLD):
            tensor = torch.full((2,), float(rank()))
            api.broadcast(tensor, src=root)
            assert tensor.eq(root).all()
            tensor = torch.full((2,), 1.0)
            api.reduce(tensor, dst=root)
            assert rank() != root or tensor.eq(2).all()
            parts = [torch.empty(2) for _ in range(WORLD)] if rank() == root else None
            api.gather(torch.full((2,), float(rank())), parts, dst=root)
            assert parts is None or [p[0].item() for p in parts] == [0, 1]
            given = [torch.full((2,), 5.0 + i) for i in range(WORLD)] if rank() == root else None
            received = torch.empty(2)
            api.scatter(received, given, src=root)
            assert received.eq(5 + rank()).all()


def check_gathers():
    for api in both():
        outputs = [torch.empty(2, 3) for _ in range(WORLD)]
        api.all_gather(outputs, torch.full((2, 3), float(rank())))
        assert [o[0, 0].item() for o in outputs] == [0, 1]
        flat, stacked = torch.empty(4, 3), torch.empty(2, 2, 3)
        for output in (flat, stacked):
            api.all_gather_into_tensor(output, torch.full((2, 3), float(rank())))
            assert output.view(2, 6).eq(torch.tensor([[0.0], [1.0]])).all()
        uneven = [torch.empty(1), torch.empty(2)]
        api.all_gather(uneven, torch.full((rank() + 1,), float(rank())))
        assert uneven[1].tolist() == [1, 1]
        ones = [torch.empty(1), torch.empty(1)]
        api.all_gather(ones, torch.tensor(float(rank())))
        assert torch.cat(ones).tolist() == [0, 1]


def check_reduce_scatters():
    for api in both():
        output = torch.empty(2)
        api.reduce_scatter(output, [torch.full((2,), float(rank())), torch.full((2,), 10.0)])
        assert output.eq(1 if rank() == 0 else 20).all()
        for shape in ((4,), (2, 2)):
            api.reduce_scatter_tensor(output, torch.ones(shape), op=ReduceOp.AVG)
            assert output.eq(1).all()


def check_all_to_all():
    for api in both():
        output = torch.empty(4)
        api.all_to_all_single(output, torch.full((4,), float(rank())))
        assert output.tolist() == [0, 0, 1, 1]
        output = torch.empty(3)
        api.all_to_all_single(
            output,
            torch.full((2 + 2 * rank(),), float(rank())),
            [1, 2],
            [1 + rank(), 1 + rank()],
        )
        assert output.tolist() == [0, 1, 1]
        outputs = [torch.empty(1), torch.empty(2)]
        api.all_to_all(outputs, [torch.full((rank() + 1,), float(rank()))] * 2)
        assert outputs[1].tolist() == [1, 1]


def check_messages():
    other = 1 - rank()
    for api in both():
        tensor = torch.full((5,), float(rank()))
        if rank() == 0:
            api.send(tensor, dst=1, tag=3)
            assert api.recv(tensor) == 1
        else:
            assert api.recv(tensor, src=0, tag=3) == 0
            api.send(tensor + 7, dst=0)
        assert tensor.eq(7 * (1 - rank())).all()
        received = torch.empty(3)
        works = [api.isend(torch.full((3,), float(rank())), other), api.irecv(received, other)]
        for work in works:
            work.wait()
        assert received.eq(other).all()


def check_batches_and_coalescing():
    other = 1 - rank()
    received, own = torch.empty(1000), torch.empty(2)
    operations = [
        ddp_dist.P2POp(ddp_dist.irecv, received, other),
        ddp_dist.P2POp(ddp_dist.isend, torch.full((1000,), float(rank())), other),
    ]
    works = ddp_dist.batch_isend_irecv(operations)
    assert len(works) == len(operations)
    for work in works:
        work.wait()
    assert received.eq(other).all()
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        ddp_dist.all_reduce(received)
        ddp_dist.all_reduce(own.fill_(1))
    manager.wait()
    assert received.eq(1).all()
    assert own.eq(2).all()


def check_a_batch_in_a_compiled_function():
    other = 1 - rank()

    def swapped(mine, received):
        mine = mine * 2
        operations = [
            ddp_dist.P2POp(ddp_dist.isend, mine, other),
            ddp_dist.P2POp(ddp_dist.irecv, received, other),
        ]
        for work in ddp_dist.batch_isend_irecv(operations):
            work.wait()
        return received + 1

    for function in (swapped, torch.compile(swapped, backend="eager")):
        found = function(torch.full((2,), float(rank())), torch.zeros(2))
        assert found.eq(2 * other + 1).all()


def check_a_forked_child_ends_no_group():
    """As at the end of its interpreter."""
    child = os.fork()
    if child == 0:
        try:
            _exit.leave()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    found = torch.ones(2)
    dist.all_reduce(found)
    assert found.eq(2).all()


def check_the_group_goes_on_after_a_batch_with_a_mistake():
    other, received = 1 - rank(), torch.empty(2)
    good = ddp_dist.P2POp(ddp_dist.irecv, received, other)
    bad = ddp_dist.P2POp(ddp_dist.isend, torch.ones(2), other, tag="a")
    for operations in ([good, bad], [bad]):
        with pytest.raises(TypeError):
            ddp_dist.batch_isend_irecv(operations)
        found = torch.ones(2)
        dist.all_reduce(found)
        assert found.eq(2).all()
    good_send = ddp_dist.P2POp(ddp_dist.isend, torch.full((2,), float(rank())), other)
    for work in ddp_dist.batch_isend_irecv([good, good_send]):
        work.wait()
    assert received.eq(other).all()


def check_object_collectives():
    mine = {"rank": rank(), "text": "x" * (10 + rank())}
    gathered = [None] * WORLD
    ddp_dist.all_gather_object(gathered, mine)
    assert [g["rank"] for g in gathered] == [0, 1]
    box = [mine if rank() == 1 else None]
    ddp_dist.broadcast_object_list(box, src=1)
    assert box[0]["rank"] == 1
    target = [None] * WORLD if rank() == 0 else None
    ddp_dist.gather_object(mine, target, dst=0)
    assert target is None or target[1]["rank"] == 1
    part = [None]
    ddp_dist.scatter_object_list(part, ["a", "b"] if rank() == 0 else [None, None], src=0)
    assert part == ["ab"[rank()]]


def check_groups():
    alone = ddp_dist.new_group([0])
    turned = ddp_dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=60))
    assert ddp_dist.get_backend(turned) == "gloo"
    assert ddp_dist.native(turned).timeout == timedelta(seconds=60)
    tensor = torch.ones(2)
    ddp_dist.all_reduce(tensor, group=turned)
    assert tensor.eq(2).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp_dist.all_reduce(tensor, group=alone)  # nothing for the rank outside
    assert tensor.eq(2).all()
    if rank() == 0:
        assert ddp_dist.native(alone).size() == 1
    ddp_dist.destroy_process_group(turned)
    ddp_dist.barrier()


def check_barriers_and_timeouts():
    ddp_dist.barrier()
    ddp_dist.barrier(async_op=True).wait()
    ddp_dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
    if rank() == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            ddp_dist.monitored_barrier(timeout=timedelta(milliseconds=300))
    ddp_dist.barrier()
    from libddp.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

    _set_pg_timeout(timedelta(minutes=7))
    assert ddp_dist.native(_get_default_group()).timeout == timedelta(minutes=7)


def check_arena_tensors():
    tensor = ddp_dist.allocate(3, 4, dtype=torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == ((3, 4), torch.bfloat16)
    tensor.fill_(rank() + 1)
    ddp_dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    assert ddp_dist.allocate((2, 2)).dtype == torch.get_default_dtype()
    assert ddp_dist.allocate().shape == ()


def check_premultiplied_sum():
    tensor = torch.full((2,), 10.0)
    ddp_dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))
    assert tensor.eq(10).all()


def check_functional_and_autograd_collectives():
    from torch.distributed import _functional_collectives as functional

    out = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert torch.as_tensor(out).eq(2).all()
    out = functional.all_gather_tensor(torch.full((2,), float(rank())), 0, dist.group.WORLD)
    assert torch.as_tensor(out).tolist() == [0, 0, 1, 1]
    leaf = torch.ones(2, requires_grad=True)
    dist.nn.all_reduce(leaf).sum().backward()
    assert leaf.grad.eq(2).all()


def check_wrong_calls_are_refused_before_any_byte_moves():
    with pytest.raises(ValueError, match="exactly one of src and group_src"):
        ddp_dist.broadcast(torch.ones(1))
    with pytest.raises(ValueError, match="5"):
        ddp_dist.broadcast(torch.ones(1), src=5)
    with pytest.raises(TypeError):
        ddp_dist.all_reduce([torch.ones(1)])
    with pytest.raises(ValueError, match="sparse"):
        ddp_dist.broadcast(torch.ones(2, 2).to_sparse(), 0)
    with pytest.raises(ValueError):
        ddp_dist.all_gather_into_tensor(torch.empty(5), torch.ones(2))
    for api in both():
        with pytest.raises(TypeError):
            api.all_reduce(torch.ones(1), op="sum")
        with pytest.raises(TypeError):
            api.reduce_scatter_tensor(torch.ones(1), [torch.ones(WORLD)])
        with pytest.raises(TypeError):
            api.all_gather_into_tensor([torch.ones(WORLD)], torch.ones(1))
    ddp_dist.barrier()


class WorldOfProperties:
    """What torch's tests of several ranks in one process put in the place of c10d's world."""

    def __init__(self, world):
        self._world = world

    @property
    def default_pg(self):
        return self._world.default_pg

    @property
    def pg_coalesce_state(self):
        return self._world.pg_coalesce_state

    def __getattr__(self, name):
        if name in ("_default_pg", "_pg_coalesce_state"):
            raise AttributeError(name)
        return getattr(self._world, name)


def check_another_world_of_torch():
    world = dist.distributed_c10d._world
    for each in (WorldOfProperties(world), world):
        dist.distributed_c10d._world = each
        tensor = torch.ones(1)
        ddp_dist.all_reduce(tensor)
        assert tensor.item() == WORLD
        with dist._coalescing_manager():
            ddp_dist.all_reduce(tensor)
        assert tensor.item() == WORLD**2


def check_profiler_events():
    with torch.profiler.profile(record_shapes=True) as profile:
        ddp_dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0)
    names = {event.name for event in profile.events()}
    assert {"libddp:all_reduce", "libddp:broadcast"} <= names


def check_profiler_events_of_models():
    """What C++ issues by itself, in the passes of a model."""
    from libddp.distributed.fsdp import fully_shard
    from libddp.nn.parallel import DistributedDataParallel

    def counts(model):
        model(torch.ones(1, 8)).sum().backward()  # the first pass agrees on the buckets
        with torch.profiler.profile() as profile:
            model(torch.ones(1, 8)).sum().backward()
        return Counter(e.name for e in profile.events() if e.name.startswith("libddp:"))

    replicated = DistributedDataParallel(torch.nn.Linear(8, 8))
    found = counts(replicated)
    assert found == {"libddp:all_reduce": 1}, found
    sharded = fully_shard(torch.nn.Linear(8, 8))
    found = counts(sharded)
    assert found["libddp:reduce_scatter"] == 1, found


def check_a_group_again_after_destroy():
    ddp_dist.barrier()
    ddp_dist.destroy_process_group()
    dist.init_process_group("libddp")  # whoever comes through torch gets the same group
    tensor = torch.ones(1)
    ddp_dist.all_reduce(tensor)
    assert tensor.item() == WORLD
    assert ddp_dist.native().name() == "world"


results, test_on_two_ranks = checks.suite(globals(), WORLD, backend="gloo")
