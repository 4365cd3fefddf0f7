"""Every collective on one rank: values, forms, dtypes. What one rank gives is what it took."""

import pytest
import torch
from subject import DEVICE, IS_CUDA, IS_LIBDDP, dist
from torch.distributed import ReduceOp

#: torch's own backend of CPU tensors, which is no subject here, only a way to try the tests.
IS_GLOO = not IS_CUDA and not IS_LIBDDP
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
OTHERS = [torch.bool, torch.complex64, torch.complex128]
if IS_GLOO:
    OTHERS.remove(torch.bool)  # Gloo reduces none
DTYPES = FLOATS + INTEGERS + OTHERS
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def values(*shape, dtype=torch.float32):
    """Different from each other as far as the dtype allows."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, device=DEVICE) % 7).reshape(shape).to(dtype)


def blank(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def done(call, *arguments, is_async: bool, **options):
    """Makes the call and waits for it in the way that it asks for."""
    work = call(*arguments, async_op=is_async, **options)
    if is_async:
        work.wait()
    else:
        assert work is None


ways = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@ways
@each_dtype
def test_all_reduce(dtype, is_async):
    tensor = values(5, 3, dtype=dtype)
    done(dist.all_reduce, tensor, is_async=is_async)
    assert torch.equal(tensor, values(5, 3, dtype=dtype))


@ways
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_reduce_operations(op, is_async):
    if op == "AVG" and IS_GLOO:
        pytest.skip("Gloo has no average in every torch")
    tensor = values(9)
    done(dist.all_reduce, tensor, is_async=is_async, op=getattr(ReduceOp, op))
    assert torch.equal(tensor, values(9))


@pytest.mark.cuda
def test_pre_multiplied_sum():
    tensor = values(9)
    dist.all_reduce(tensor, op=torch.distributed._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, values(9) * 0.5)


@pytest.mark.libddp
@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bit_operations_work_or_name_themselves(op):
    """NCCL has none: the error says so before anything has started, and the group goes on."""
    tensor = values(9, dtype=torch.int64)
    if IS_CUDA:
        with pytest.raises(ValueError, match=op):
            dist.all_reduce(tensor, op=getattr(ReduceOp, op))
    else:
        dist.all_reduce(tensor, op=getattr(ReduceOp, op))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, values(9, dtype=torch.int64))


@ways
@pytest.mark.parametrize("call", [dist.reduce, dist.broadcast])
@each_dtype
def test_rooted(call, dtype, is_async):
    tensor = values(4, 2, dtype=dtype)
    done(call, tensor, 0, is_async=is_async)
    assert torch.equal(tensor, values(4, 2, dtype=dtype))


@ways
@each_dtype
def test_all_gather(dtype, is_async):
    flat, listed = blank(6, dtype=dtype), [blank(6, dtype=dtype)]
    done(dist.all_gather_into_tensor, flat, values(6, dtype=dtype), is_async=is_async)
    done(dist.all_gather, listed, values(6, dtype=dtype), is_async=is_async)
    assert torch.equal(flat, values(6, dtype=dtype))
    assert torch.equal(listed[0], values(6, dtype=dtype))


@ways
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
def test_reduce_scatter(dtype, is_async):
    flat, listed = blank(6, dtype=dtype), blank(6, dtype=dtype)
    done(dist.reduce_scatter_tensor, flat, values(6, dtype=dtype), is_async=is_async)
    done(dist.reduce_scatter, listed, [values(6, dtype=dtype)], is_async=is_async)
    assert torch.equal(flat, values(6, dtype=dtype))
    assert torch.equal(listed, values(6, dtype=dtype))


@ways
@each_dtype
def test_all_to_all(dtype, is_async):
    flat = blank(6, dtype=dtype)
    done(dist.all_to_all_single, flat, values(6, dtype=dtype), is_async=is_async)
    assert torch.equal(flat, values(6, dtype=dtype))


@ways
def test_uneven_forms(is_async):
    uneven = blank(5, 2)
    done(dist.all_to_all_single, uneven, values(5, 2), [5], [5], is_async=is_async)
    assert torch.equal(uneven, values(5, 2))


@ways
@pytest.mark.skipif(IS_GLOO, reason="Gloo has no list form")
def test_list_form_of_all_to_all(is_async):
    [out] = outs = [blank(3)]
    done(dist.all_to_all, outs, [values(3)], is_async=is_async)
    assert torch.equal(out, values(3))


@ways
def test_gather_and_scatter(is_async):
    gathered, scattered = [blank(4)], blank(4)
    done(dist.gather, values(4), gathered, is_async=is_async)
    done(dist.scatter, scattered, [values(4)], is_async=is_async)
    assert torch.equal(gathered[0], values(4))
    assert torch.equal(scattered, values(4))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_travels(dtype):
    """Reduced where NCCL and the device can; moved always."""
    tensor, flat = values(8).to(dtype), blank(8).to(dtype)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(flat, tensor)
    assert torch.equal(flat.float(), values(8))
    if torch.cuda.get_device_capability() >= (9, 0):
        dist.all_reduce(tensor)
        assert torch.equal(tensor.float(), values(8))


def test_odd_tensors():
    empty, scalar = torch.empty(0, 3, device=DEVICE), values(1)[0]
    dist.all_reduce(empty)
    dist.all_reduce(scalar)
    strided = values(4, 6)[:, ::2]
    dist.all_reduce(strided)
    assert torch.equal(strided, values(4, 6)[:, ::2])
    channels = values(2, 3, 4, 4).to(memory_format=torch.channels_last)
    dist.all_reduce(channels)
    assert torch.equal(channels, values(2, 3, 4, 4))


@pytest.mark.libddp
def test_forms_that_torch_refuses():
    """A stack, and an output that matches in elements but not in shape."""
    stacked, one = blank(1, 6), [blank(1)]
    dist.all_gather_into_tensor(stacked, values(6))
    dist.all_gather(one, values(1)[0])
    assert torch.equal(stacked[0], values(6))


@pytest.mark.skipif(IS_GLOO, reason="Gloo coalesces nothing")
@pytest.mark.parametrize("call", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_coalesced(call):
    tensors = [values(3), values(4, 2), values(5)]
    outs = [tensor.clone() for tensor in tensors]
    with torch.distributed._coalescing_manager(device=DEVICE, async_ops=True) as work:
        for out, tensor in zip(outs, tensors, strict=True):
            if call == "all_reduce":
                torch.distributed.all_reduce(out)
            else:
                getattr(torch.distributed, call)(out, tensor)
    work.wait()
    assert all(map(torch.equal, outs, tensors))


@pytest.mark.cuda
def test_grouped_send_and_receive_of_itself():
    out = blank(1000)
    operations = [dist.P2POp(dist.isend, values(1000), 0), dist.P2POp(dist.irecv, out, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(out, values(1000))


def test_objects():
    gathered, one = [None], [{"a": 1}]
    dist.all_gather_object(gathered, ("x", 2))
    dist.broadcast_object_list(one, src=0)
    assert gathered == [("x", 2)]
    assert one == [{"a": 1}]


def test_barrier():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    if IS_CUDA:
        dist.barrier(device_ids=[DEVICE.index])


def test_works_and_futures():
    tensor = values(1000)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    work.wait()
    assert future.wait()[0].data_ptr() == tensor.data_ptr()
    assert future.then(lambda f: f.value()[0] * 2).wait().sum() == 2 * values(1000).sum()
    if IS_CUDA:
        torch.cuda.synchronize()
    assert work.is_completed()


@pytest.mark.libddp
def test_allocated_memory():
    """The group's own: registered with NCCL where it can be, freed with its last tensor."""
    tensor = dist.allocate(1 << 20, dtype=torch.bfloat16, device=DEVICE)
    assert (tensor.device, tensor.shape, tensor.dtype) == (DEVICE, (1 << 20,), torch.bfloat16)
    tensor.fill_(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor[100:1000])
    assert tensor.eq(3).all()
    del tensor
    again = dist.allocate(1 << 20, dtype=torch.bfloat16, device=DEVICE).fill_(1)
    dist.all_reduce(again)
    assert again.eq(1).all()


def test_groups_of_groups():
    group = dist.new_group([0])
    tensor = values(10)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, values(10))


def test_device_mesh():
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (1, 1), mesh_dim_names=("dp", "tp"))
    tensor = values(10)
    torch.distributed.all_reduce(tensor, group=mesh["dp"].get_group())
    assert torch.equal(tensor, values(10))


@pytest.mark.cuda
def test_host_tensors_of_the_same_group():
    """One group serves both; neither waits for the other."""
    host, device = torch.arange(5.0), values(5)
    work = dist.all_reduce(device, async_op=True)
    dist.all_reduce(host)
    work.wait()
    assert torch.equal(host, torch.arange(5.0))
    assert torch.equal(device, values(5))
