"""The hot calls: torch's functions with a straight way to C++.

Signatures are torch's. A call on dense tensors of one of libddp's groups goes to the C++ group
directly; everything else (devices that the group does not move, tensor subclasses, sparse tensors,
foreign groups, ranks outside the group, open coalescing) is handed to torch's function of the same
name, which reaches the same group through our c10d backend where it is ours. Results and errors are
the same.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ReduceOp

from libddp._load import load
from libddp.distributed._groups import backend_of, find, torch_side
from libddp.errors import ArgumentError

#: torch's own, also after libddp.install() has put ours in its place.
_torch_monitored_barrier = c10d.monitored_barrier
_torch_batch_isend_irecv = c10d.batch_isend_irecv
_C = load()
#: straight(group, tensor): the C++ group that takes the call, or None where torch has to.
_straight = _C.straight
# The hottest calls are made there, too; NotImplemented where torch has to.
_straight_all_reduce = _C.straight_all_reduce
_straight_all_gather_into = _C.straight_all_gather_into
_straight_reduce_scatter_into = _C.straight_reduce_scatter_into


def _rank_in(native, group, rank: int | None, group_rank: int | None, what: str) -> int:
    """A rank of the group from torch's two ways to name it."""
    if (rank is None) == (group_rank is None):
        raise ArgumentError(f"libddp: pass exactly one of {what} and group_{what}.")
    if group_rank is not None:
        return group_rank
    if group is None:
        return rank
    try:
        return native.global_ranks().index(rank)
    except ValueError:
        raise ArgumentError(
            f"libddp: {what}={rank} is not among the global ranks {native.global_ranks()} of the "
            f"group. Hint: {what} is a global rank; group_{what} is one of the group."
        ) from None


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Reduces `tensor` over all ranks, in place; bit-identical everywhere.

    Args:
        tensor: dense; any dtype that torch reduces.
        op: ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR.
        group: None = the default group.
        async_op: return a Work at once instead of waiting.

    Returns:
        A Work with wait(), is_completed() and get_future() if async_op, else None.

    Raises:
        PeerError: another rank died or called something else. TimeoutError: it did not come.

    Example:
        >>> from libddp.distributed import all_reduce, destroy_process_group, init_process_group
        >>> import torch
        >>> init_process_group("gloo", rank=0, world_size=1)
        >>> all_reduce(torch.ones(3))
        >>> destroy_process_group()
    """
    result = _straight_all_reduce(group, tensor, op, async_op)
    if result is NotImplemented:
        return dist.all_reduce(tensor, op, group, async_op)
    return result


def reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op: bool = False, group_dst=None):
    """As all_reduce; the result is defined on `dst` (a global rank) only."""
    native = _straight(group, tensor)
    if native is None:
        return dist.reduce(tensor, dst, op, group, async_op, group_dst)
    return native.reduce(tensor, _rank_in(native, group, dst, group_dst, "dst"), op, async_op)


def broadcast(tensor, src=None, group=None, async_op: bool = False, group_src=None):
    """Copies the tensor of rank `src` (a global rank) to all ranks, in place."""
    native = _straight(group, tensor)
    if native is None:
        return dist.broadcast(tensor, src, group, async_op, group_src)
    return native.broadcast(tensor, _rank_in(native, group, src, group_src, "src"), async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Gathers every rank's `tensor` into `tensor_list`; sizes may differ between ranks."""
    native = _straight(group, tensor)
    if native is None:
        return dist.all_gather(tensor_list, tensor, group, async_op)
    return native.all_gather(tensor_list, tensor, async_op)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    """As all_gather, into one tensor: concatenated along dim 0, or stacked."""
    result = _straight_all_gather_into(group, output_tensor, input_tensor, async_op)
    if result is NotImplemented:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    return result


def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Reduces one input per rank; each rank gets its own in `output`."""
    native = _straight(group, output)
    if native is None:
        return dist.reduce_scatter(output, input_list, op, group, async_op)
    return native.reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_tensor(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """As reduce_scatter, with the inputs as equal blocks of one tensor."""
    result = _straight_reduce_scatter_into(group, output, input, op, async_op)
    if result is NotImplemented:
        return dist.reduce_scatter_tensor(output, input, op, group, async_op)
    return result


def all_to_all_single(
    output,
    input,
    output_split_sizes=None,
    input_split_sizes=None,
    group=None,
    async_op: bool = False,
):
    """Sends rows of `input` to each rank and receives rows of `output` from each."""
    native = _straight(group, input)
    if native is None:
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    return native.all_to_all_single(
        output, input, output_split_sizes or [], input_split_sizes or [], async_op
    )


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op: bool = False):
    """Input i goes to rank i of the group; output i comes from it."""
    native = _straight(group, input_tensor_list[0]) if input_tensor_list else None
    if native is None:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    return native.all_to_all(output_tensor_list, input_tensor_list, async_op)


def send(tensor, dst=None, group=None, tag: int = 0, group_dst=None) -> None:
    """Sends to rank `dst` (a global rank); ends when the receiver has taken it."""
    native = _straight(group, tensor)
    if native is None:
        dist.send(tensor, dst, group, tag, group_dst)
    else:
        native.send(tensor, _rank_in(native, group, dst, group_dst, "dst"), tag)


def recv(tensor, src=None, group=None, tag: int = 0, group_src=None) -> int:
    """Receives from rank `src`, from any where it is None; returns the global rank it came from."""
    native = _straight(group, tensor)
    if native is None:
        return dist.recv(tensor, src, group, tag, group_src)
    source = None
    if src is not None or group_src is not None:
        source = _rank_in(native, group, src, group_src, "src")
    return native.global_ranks()[native.recv(tensor, source, tag)]


def barrier(group=None, async_op: bool = False, device_ids=None, timeout=None):
    """Ends when all ranks of the group have come, or with an error after `timeout`.

    `timeout` (timedelta; None = the group's) came into torch's signature after 2.11; here it works
    with every torch.
    """
    native = find(group)
    group = torch_side(group) or c10d._world.default_pg
    if native is not None and len(getattr(group, "_device_types", "1")) == 1:
        return native.barrier(async_op, timeout)
    if timeout is not None:
        return _barrier_within(group, async_op, timeout)
    return dist.barrier(group, async_op, device_ids)


def _barrier_within(group, async_op: bool, timeout):
    options = dist.BarrierOptions()
    options.timeout = timeout
    options.asyncOp = async_op
    work = group.barrier(opts=options)
    if async_op:
        return work
    work.wait()


def monitored_barrier(group=None, timeout=None, wait_all_ranks: bool = False):
    """A barrier that names the ranks that did not come within `timeout`; the group stays usable.

    Raises:
        TimeoutError: on rank 0 "Rank N failed to pass monitoredBarrier" (with wait_all_ranks all of
            them), on the others that rank 0 says so.
    """
    native = find(group)
    if native is None:
        return _torch_monitored_barrier(group, timeout, wait_all_ranks)
    if timeout is None:
        timeout = native.timeout
    elif not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)  # as torch's
    pg = torch_side(group) or c10d._world.default_pg
    return pg.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def _drop_batch(p2p_op_list):
    """Nothing is sent of a batch of which an operation was refused: the group goes on.

    torch leaves the batch open, in which later calls would do nothing.
    """
    group = getattr(p2p_op_list[0], "group", None) if p2p_op_list else None
    group = group or c10d._world.default_pg
    if c10d._world.pg_coalesce_state.pop(group, None) is not None:
        for device in group._device_types:
            _C.drop_batch(backend_of(group, device))


def batch_isend_irecv(p2p_op_list):
    """torch's, with a work for each operation, as Gloo has them.

    On the CPU they are all the same one, which ends with the last of the batch; on CUDA there is
    one for the batch, as with NCCL.
    """
    # Only then, as it imports torch._dynamo, which takes seconds.
    is_compiling = "torch._dynamo" in sys.modules
    return (_uncompiled_batch if is_compiling else _batch)(p2p_op_list)


def _batch(p2p_op_list):
    try:
        works = _torch_batch_isend_irecv(p2p_op_list)
    except BaseException:
        _drop_batch(p2p_op_list)
        raise
    if len(works) == 1 and p2p_op_list[0].tensor.device.type == "cpu":
        return works * len(p2p_op_list)
    return works


#: Dynamo knows torch's function by its identity.
_uncompiled_batch = torch._disable_dynamo(_batch)


def allocate(*size, dtype=None, device=None, group=None) -> torch.Tensor:
    """An uninitialised tensor in the group's arena: its collectives copy nothing.

    Args:
        size: as in torch.empty: integers, or one sequence of them.
        dtype: None = torch's default dtype.
        device: None = CPU. On a CUDA device: in memory that the group's communicator knows.
        group: None = the default group.

    Raises:
        ArgumentError: the group is not one of libddp's.
    """
    from libddp.distributed._groups import native

    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = torch.get_default_dtype() if dtype is None else dtype
    found = native(group)
    if device is None:
        return found.allocate(list(shape), dtype)
    return found.allocate(list(shape), dtype, torch.device(device))
