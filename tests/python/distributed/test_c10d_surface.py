"""What torch expects of a c10d backend, as tables: torch's own functions over backend "libddp"."""

import gc
import inspect
import threading
import warnings
from datetime import timedelta

import checks
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp

from libddp import distributed as ddp_dist

WORLD = 4
REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
FOLDS = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
}
BITS = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def begin():
    dist.init_process_group("libddp")


def rank():
    return dist.get_rank()


def row(dtype, of_rank, numel=2 * WORLD):
    """Small whole numbers, so that every reduction is exact in every dtype."""
    values = (torch.arange(numel) * (of_rank + 2) + of_rank) % 3 + 1
    if dtype is torch.bool:
        return values > 1
    return (
        torch.complex(values.double(), -values.double()).to(dtype)
        if dtype.is_complex
        else (values.to(dtype))
    )


def reductions():
    """(op, dtype, the result) for all that torch defines."""
    for dtype in (*REALS, *INTEGERS, torch.bool, *COMPLEX):
        rows = torch.stack([row(dtype, r) for r in range(WORLD)])
        if dtype.is_complex:
            yield ReduceOp.SUM, dtype, rows.sum(0)
            continue
        wide = rows.long() if dtype is torch.bool else rows.double()
        for op, fold in FOLDS.items():
            yield op, dtype, fold(wide).to(dtype)
        if dtype.is_floating_point:
            yield ReduceOp.AVG, dtype, wide.mean(0).to(dtype)
        else:
            for op, combine in BITS.items():
                total = rows[0]
                for other in rows[1:]:
                    total = combine(total, other)
                yield op, dtype, total


def check_every_reduction_of_every_dtype():
    for op, dtype, expected in reductions():
        own = row(dtype, rank())
        what = (op, dtype)
        tensor = own.clone()
        dist.all_reduce(tensor, op)
        assert tensor.equal(expected), what
        tensor = own.clone()
        dist.reduce(tensor, 2, op)
        assert rank() != 2 or tensor.equal(expected), what
        if dtype.is_complex:
            continue
        mine = slice(2 * rank(), 2 * rank() + 2)
        output = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(output, own, op)
        assert output.equal(expected[mine]), what
        dist.reduce_scatter(output.zero_(), list(own.chunk(WORLD)), op)
        assert output.equal(expected[mine]), what
        if op not in BITS and op != ReduceOp.AVG:
            pair = [own.clone(), own[:3].clone()]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.all_reduce_coalesced(pair, op)
            assert pair[0].equal(expected), what
            assert pair[1].equal(expected[:3]), what


def check_every_move_of_every_dtype():
    more = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)
    for dtype in (*REALS, *INTEGERS, torch.bool, *COMPLEX, *more):
        rows = [row(dtype, r) for r in range(WORLD)]

        def same(found, expected):
            return found.view(torch.uint8).equal(expected.view(torch.uint8))

        tensor = rows[rank()].clone()
        dist.broadcast(tensor, 1)
        assert same(tensor, rows[1]), dtype
        outputs = [torch.zeros_like(tensor) for _ in range(WORLD)]
        dist.all_gather(outputs, rows[rank()])
        assert all(map(same, outputs, rows)), dtype
        flat = torch.zeros(2 * WORLD * WORLD, dtype=dtype)
        dist.all_gather_into_tensor(flat, rows[rank()])
        assert same(flat, torch.cat(rows)), dtype
        output = torch.zeros_like(tensor)
        dist.all_to_all_single(output, rows[rank()])
        mine = slice(2 * rank(), 2 * rank() + 2)
        assert same(output, torch.cat([r[mine] for r in rows])), dtype
        dist.scatter(output.zero_(), rows if rank() == 3 else None, src=3)
        assert same(output, rows[rank()]), dtype
        gathered = outputs if rank() == 2 else None
        dist.gather(rows[rank()], gathered, dst=2)
        assert gathered is None or all(map(same, gathered, rows)), dtype
        before, after = (rank() - 1) % WORLD, (rank() + 1) % WORLD
        works = [dist.isend(rows[rank()], after), dist.irecv(output, before)]
        assert all(work.wait() for work in works)
        assert same(output, rows[before]), dtype


def check_what_gloo_refuses():
    outputs = [torch.empty(r + 1) for r in range(WORLD)]
    dist.all_to_all(outputs, [torch.full((rank() + 1,), float(r)) for r in range(WORLD)])
    assert all(o.eq(rank()).all() for o in outputs)
    stacked = torch.empty(WORLD, 3)
    dist.all_gather_into_tensor(stacked, torch.full((3,), float(rank())))
    assert stacked[:, 0].tolist() == [0, 1, 2, 3]
    block = torch.empty(3)
    dist.reduce_scatter_tensor(block, torch.full((WORLD, 3), 1.0))
    assert block.eq(WORLD).all()
    uneven = [torch.empty(r + 1) for r in range(WORLD)]
    dist.all_gather(uneven, torch.full((rank() + 1,), float(rank())))
    assert [u[-1].item() for u in uneven] == [0, 1, 2, 3]
    halves = dist._make_nccl_premul_sum(0.5)
    for call in (dist.all_reduce, lambda t, op: dist.reduce(t, 0, op)):
        tensor = torch.ones(2)
        call(tensor, halves)
        assert rank() != 0 or tensor.eq(WORLD / 2).all()
    dist.reduce_scatter_tensor(block, torch.ones(3 * WORLD), halves)
    assert block.eq(WORLD / 2).all()
    own, received = torch.full((2,), float(rank())), torch.empty(2)
    batch = [dist.P2POp(dist.irecv, received, rank()), dist.P2POp(dist.isend, own, rank())]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert received.equal(own)


def asynchronous_calls():
    """(what the future holds, the call) by name."""
    t = torch.full((WORLD,), 1.0)
    one, many = torch.empty(1), [torch.empty(WORLD) for _ in range(WORLD)]
    wide = torch.empty(WORLD * WORLD)
    at_root = many if rank() == 0 else None
    return {
        "all_reduce": (t, lambda: dist.all_reduce(t, async_op=True)),
        "reduce": (t, lambda: dist.reduce(t, 0, async_op=True)),
        "broadcast": (t, lambda: dist.broadcast(t, 0, async_op=True)),
        "all_gather": (many[0], lambda: dist.all_gather(many, t, async_op=True)),
        "into": (wide, lambda: dist.all_gather_into_tensor(wide, t, async_op=True)),
        "gather": (None, lambda: dist.gather(t, at_root, async_op=True)),
        "scatter": (t, lambda: dist.scatter(t, at_root, async_op=True)),
        "scattered": (one, lambda: dist.reduce_scatter_tensor(one, t.clone(), async_op=True)),
        "lists": (one, lambda: dist.reduce_scatter(one, list(t.chunk(WORLD)), async_op=True)),
        "single": (t, lambda: dist.all_to_all_single(t, t.clone(), async_op=True)),
        "to_all": (many[0], lambda: dist.all_to_all(many, [t] * WORLD, async_op=True)),
    }


def check_async_and_future_forms():
    for name, (result, call) in asynchronous_calls().items():
        assert call().wait() is True, name
        work = call()
        future = work.get_future()
        seen = future.then(lambda f: f.value()).wait()
        assert work.is_completed(), name
        assert work.is_success(), name
        if result is not None:
            assert seen[0].data_ptr() == result.data_ptr(), name
    assert dist.barrier(async_op=True).wait() is True


def check_sparse_asynchronously():
    rows = torch.zeros(6, 2)
    rows[rank()] = rank() + 1.0
    works, tensors = [], [rows.to_sparse() for _ in range(3)]
    for i, tensor in enumerate(tensors):
        if (i + rank()) % 2:  # each rank as it likes
            works.append(dist.all_reduce(tensor, async_op=True))
        else:
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(1))
    for work in works:
        work.wait()
    for tensor in tensors:
        assert tensor.to_dense()[:, 0].tolist() == [1, 2, 3, 4, 0, 0]


def lists_of_tensors():
    """Calls with several tensors of one rank, and sparse ones, beside their results."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    outputs = [[torch.zeros(2) for _ in range(2 * WORLD)] for _ in range(2)]
    backend.allgather(outputs, [torch.full((2,), rank() + part / 2) for part in (0.0, 1.0)]).wait()
    yield [t for row in outputs for t in row], 2 * [torch.full((2,), r / 2) for r in range(8)]
    same = [torch.full((2,), float(rank())), torch.zeros(2)]
    backend.broadcast(same).wait()
    yield same, 2 * [torch.zeros(2)]
    sums = [torch.full((2,), float(part)) for part in (1, 2)]
    backend.allreduce(sums).wait()
    yield sums, 2 * [torch.full((2,), 3.0 * WORLD)]
    for asynchronous in (False, True):
        sparse = torch.sparse_coo_tensor([[rank()]], [1.0], (WORLD,))
        work = dist.all_reduce(sparse, async_op=asynchronous)
        if work is not None:
            work.wait()
        yield [sparse.to_dense()], [torch.ones(WORLD)]
    entries = [torch.sparse_coo_tensor([[rank()]], [1.0], (WORLD,)) for _ in range(2)]
    backend.allreduce(entries).wait()
    yield [t.to_dense() for t in entries], 2 * [torch.full((WORLD,), 2.0)]


def check_lists_of_tensors_in_inference_mode():
    for got, wanted in lists_of_tensors():
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    with torch.inference_mode():
        for got, wanted in lists_of_tensors():
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def check_coalescing_manager():
    sums = [torch.full((n,), float(rank())) for n in (1, 5, 1000)]
    for asynchronous in (False, True):
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in sums:
                dist.all_reduce(tensor, ReduceOp.MAX)
        if asynchronous:
            manager.wait()
        assert all(tensor.eq(WORLD - 1).all() for tensor in sums)
    gathered = [torch.empty(WORLD * n) for n in (1, 3)]
    with dist._coalescing_manager():
        for output in gathered:
            dist.all_gather_into_tensor(output, torch.full((len(output) // WORLD,), float(rank())))
    assert gathered[0].tolist() == [0, 1, 2, 3]
    scattered = [torch.empty(n) for n in (1, 3)]
    with dist._coalescing_manager():
        for output in scattered:
            dist.reduce_scatter_tensor(output, torch.ones(WORLD * len(output)))
    assert all(output.eq(WORLD).all() for output in scattered)


def check_expanded_tensors():
    """As the gradient of a sum is; fvcore's differentiable all-reduce passes it on."""
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 1), lambda t: dist.reduce(t, 0)):
        column = torch.arange(2.0).add(rank())[:, None]
        expected = column.repeat(1, 3)
        call(expected)
        call(column.expand(2, 3))
        assert torch.equal(column.expand(2, 3), expected)


def check_functional_collectives():
    everyone = dist.group.WORLD
    own = torch.full((WORLD,), float(rank()))
    blocks = torch.arange(4.0)

    def found(tensor):
        return torch.as_tensor(tensor).tolist()

    assert found(functional.all_reduce(own, "avg", everyone)) == [1.5] * 4
    assert found(functional.broadcast(own, 2, everyone)) == [2.0] * 4
    assert found(functional.all_gather_tensor(own[:1], 0, everyone)) == [0, 1, 2, 3]
    assert found(functional.reduce_scatter_tensor(blocks, "sum", 0, everyone)) == [4.0 * rank()]
    assert found(functional.all_to_all_single(blocks, None, None, everyone)) == [rank()] * 4
    pair = functional.all_reduce_coalesced([own, own[:1]], "sum", everyone)
    assert [found(t)[0] for t in pair] == [6, 6]
    pair = functional.all_gather_into_tensor_coalesced([own[:1], own[:2]], everyone)
    assert found(pair[1]) == [0, 0, 1, 1, 2, 2, 3, 3]
    pair = functional.reduce_scatter_tensor_coalesced([blocks, blocks], "sum", [0, 0], everyone)
    assert [found(t) for t in pair] == [[4.0 * rank()]] * 2
    with pytest.raises(RuntimeError, match="Split sizes doesn't match"):
        functional.all_to_all_single(blocks, [5, 0, 0, 0], [0, 0, 0, 5], everyone)


def sum_of_ranks(group):
    tensor = torch.tensor([float(rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # torch 2.15


def split_by(split_group):
    mine = split_group(split_ranks=[[2, 0], [1, 3]], timeout=timedelta(seconds=17))
    ranks = [[2, 0] if KEEPS_ORDER else [0, 2], [1, 3]][rank() % 2]
    assert dist.get_process_group_ranks(mine) == ranks
    assert dist.get_rank(mine) == ranks.index(rank())
    assert sum_of_ranks(mine) == sum(ranks)
    assert ddp_dist.native(mine).timeout == timedelta(seconds=17)
    for _ in range(2):  # also under names that torch makes of equal ranks
        alone = split_group(mine, split_ranks=[[1]])
        if dist.get_rank(mine) == 1:
            assert sum_of_ranks(alone) == rank()
        else:
            assert alone is (dist.GroupMember.NON_GROUP_MEMBER if KEEPS_ORDER else None)


def check_split_group_of_torch():
    if not KEEPS_ORDER:
        return  # torch 2.11 splits groups with CUDA only
    split_by(dist.split_group)
    mine = dist.split_group(split_ranks=[[3, 2, 1, 0]])
    dist.monitored_barrier(mine)
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, rank(), group=mine)
    assert everyone == [3, 2, 1, 0]


def check_sub_groups():
    neighbours = [0, 1] if rank() < 2 else [2, 3]
    local = dist.new_group(neighbours, use_local_synchronization=True)
    assert sum_of_ranks(local) == sum(neighbours)
    mine, every = dist.new_subgroups(2)
    assert (len(every), sum_of_ranks(mine)) == (2, sum(neighbours))
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert sum_of_ranks(mine) == 3
    split_by(ddp_dist.split_group)
    for wrong, text in (([], "is empty"), ([[0], []], "empty part"), ([[0, 4]], "does not have")):
        with pytest.raises(ValueError, match=text):
            ddp_dist.split_group(split_ranks=wrong)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    assert sum_of_ranks(mesh.get_group("shards")) == sum(neighbours)
    assert sum_of_ranks(mesh["replicas"].get_group()) == 2 + 2 * (rank() % 2)


def check_several_groups_from_several_threads():
    groups = [dist.new_group(backend="libddp") for _ in range(4)]
    sums = [[] for _ in groups]

    def work(group, found):
        for step in range(100):
            tensor = torch.full((37,), float(rank() + step))
            dist.all_reduce(tensor, group=group)
            found.append(tensor[5].item())

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip(groups, sums, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(found == [6.0 + 4 * step for step in range(100)] for found in sums)


def check_torchs_own_monitored_barrier():
    """torch's function may want the name "gloo"; ours takes its place under libddp.install()."""
    import libddp

    libddp.install()
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    finally:
        libddp.uninstall()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)
    if rank() == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            ddp_dist.monitored_barrier(timeout=timedelta(0))
    dist.barrier()


def check_a_call_in_vain_says_timeout_in_gloos_words():
    pair = [0, 1] if rank() < 2 else [2, 3]
    group = dist.new_group(pair, timeout=timedelta(seconds=1), use_local_synchronization=True)
    if rank() == 0:
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) "):
            dist.barrier(group)
    dist.barrier()


def check_profiler_events():
    titles = {"all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter", "all_to_all"}
    with torch.profiler.profile(record_shapes=True) as profile:
        for name, (_, call) in asynchronous_calls().items():
            assert call().wait(), name
        if rank() == 0:
            dist.send(torch.ones(2), 1)
            dist.send(torch.ones(2), 1)
        elif rank() == 1:
            dist.recv(torch.ones(2), 0)
            dist.recv(torch.ones(2))
    found = {event.name: event for event in profile.events()}
    titles |= {"gather", "scatter"}
    titles |= {0: {"send"}, 1: {"recv", "recvAnySource"}}.get(rank(), set())
    assert {f"libddp:{title}" for title in titles} <= set(found)
    assert found["libddp:all_reduce"].is_async
    assert found["libddp:all_reduce"].input_shapes == [[WORLD]]
    # The results are in a cycle; torch 2.15 can crash where the end of the interpreter frees them.
    del profile, found
    gc.collect()


def check_sequence_numbers():
    """Of the backend: torch asks a group's only where it knows the backend by name."""
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    start = backend._get_sequence_number_for_group()
    for step in range(1, 4):
        dist.all_reduce(torch.ones(1), group=group)
        assert backend._get_sequence_number_for_group() == start + step


results, test_on_four_ranks = checks.suite(globals(), WORLD, begin=begin)
