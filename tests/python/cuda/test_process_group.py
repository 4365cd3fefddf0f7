"""Groups on device tensors as scripts use them: libddp's calls and torch's, over the mock NCCL."""

import os
import time

import fakegpu
import libddp.distributed as libddp
import mock_nccl
import pytest
import ranks
import torch
import torch.distributed as dist
from libddp.distributed import _init
from libddp.distributed._groups import native
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))


def begin(backend=None, **arguments):
    """The rank's device."""
    fakegpu.load()
    mock_nccl.install()
    rank = int(os.environ["RANK"])
    torch.fakegpu.set_device(rank)
    libddp.init_process_group(backend, **arguments)
    return torch.device(fakegpu.NAME, rank)


def end():
    races = fakegpu.races()
    assert not races, "\n".join(races)
    libddp.destroy_process_group()
    assert mock_nccl.live().communicators == 0


def calls_of_libddp():
    device = begin()
    rank, size = libddp.get_rank(), libddp.get_world_size()
    tensor = torch.full((4,), rank + 1.0, device=device)
    assert libddp.all_reduce(tensor) is None
    assert tensor.tolist() == [size * (size + 1) / 2] * 4
    work = libddp.all_reduce(tensor, op=libddp.ReduceOp.AVG, async_op=True)
    work.wait()
    gathered = torch.empty(4 * size, device=device)
    libddp.all_gather_into_tensor(gathered, tensor + rank)
    assert gathered[::4].tolist() == [tensor[0].item() + r for r in range(size)]
    part = torch.empty(4, device=device)
    libddp.reduce_scatter_tensor(part, gathered, async_op=True).wait()
    outputs = [torch.empty(r + 1, device=device) for r in range(size)]
    libddp.all_gather(outputs, torch.full((rank + 1,), float(rank), device=device))
    assert [output[0].item() for output in outputs] == list(range(size))
    libddp.broadcast(tensor.fill_(rank), src=1)
    assert tensor.tolist() == [1.0] * 4
    libddp.reduce(tensor, dst=0)
    assert tensor[0].item() == (size if rank == 0 else 1)
    if rank == 0:
        libddp.send(tensor, 1)
    if rank == 1:
        libddp.recv(tensor, 0)
        assert tensor[0].item() == size
    libddp.barrier()
    # Those on the CPU go beside them.
    on_cpu = torch.ones(2)
    libddp.all_reduce(on_cpu)
    assert on_cpu.tolist() == [size] * 2
    assert native().backend_name() == "host"
    end()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_calls_of_libddp(world_size):
    ranks.run(calls_of_libddp, world_size)


def calls_of_torch():
    device = begin("libddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4,), float(rank), device=device)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert doubled.tolist() == [size * (size - 1)] * 4
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "tensor": tensor})
    assert [entry["rank"] for entry in objects] == list(range(size))
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, src=1)
    assert told == ["from 1"]
    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(4, device=device)
    sent = torch.full((4,), float(rank), device=device)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
    ):
        work.wait()
    assert received.tolist() == [left] * 4
    mixed = torch.empty(size, device=device)
    dist.all_to_all_single(mixed, torch.arange(float(size), device=device) + 10 * rank)
    assert mixed.tolist() == [10.0 * r + rank for r in range(size)]
    parts = [torch.empty(2, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank), device=device), parts, dst=0)
    if rank == 0:
        assert [part[0].item() for part in parts] == list(range(size))
    group = dist.new_group([0, 1])
    if rank < 2:
        pair = torch.ones(2, device=device)
        dist.all_reduce(pair, group=group)
        assert pair.tolist() == [2, 2]
    dist.barrier()
    end()


def test_the_calls_of_torch():
    ranks.run(calls_of_torch, 3)


def mesh_and_tensors():
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    device = begin()
    mesh = init_device_mesh(fakegpu.NAME, (2,))
    whole = torch.arange(16.0, device=device).view(4, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = sharded @ DTensor.from_local(whole, mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), whole @ whole)
    end()


def test_device_meshes_and_dtensors():
    ranks.run(mesh_and_tensors, 2)


def sharded_by_torch(device_name):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]).to(device_name)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = net(torch.randn(4, 8).to(device_name)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp2():
    begin()
    losses = sharded_by_torch(fakegpu.NAME)
    end()
    return losses


def fsdp2_on_cpu():
    libddp.init_process_group("gloo")
    losses = sharded_by_torch("cpu")
    libddp.destroy_process_group()
    return losses


def test_fsdp2_of_torch_as_on_the_cpu():
    assert ranks.run(fsdp2, 2) == ranks.run(fsdp2_on_cpu, 2)


def eager():
    fakegpu.load()
    device = begin(device_id=torch.device(fakegpu.NAME, int(os.environ["RANK"])))
    made = mock_nccl.live().communicators
    libddp.all_reduce(torch.ones(1, device=device))
    assert mock_nccl.live().communicators == made == 1
    end()


def test_device_id_makes_the_communicator_at_once():
    ranks.run(eager, 2)


def eager_parts():
    fakegpu.load()
    device = begin(device_id=torch.device(fakegpu.NAME, int(os.environ["RANK"])))
    rank = libddp.get_rank()
    part = libddp.new_group([0, 2])
    if rank == 1:
        assert part == dist.GroupMember.NON_GROUP_MEMBER
    else:
        tensor = torch.full((4,), rank + 1.0, device=device)
        libddp.all_reduce(tensor, group=part)
        assert tensor.tolist() == [4] * 4
    libddp.all_reduce(torch.ones(1, device=device))
    end()


def test_device_id_and_groups_of_some_ranks():
    """torch tells who is outside of a new group about a split, which libddp does not make."""
    ranks.run(eager_parts, 3)


def timed():
    device = begin()
    libddp.all_reduce(torch.ones(1, device=device))
    entry, end_of_wait = {}, time.monotonic() + 30
    while entry.get("state") != "done" and time.monotonic() < end_of_wait:
        [log] = libddp.flight_log()["groups"]
        [entry] = [each for each in log["operations"] if each["kind"] == "all_reduce"]
        time.sleep(0.01)
    assert (entry["device"], entry["state"]) == ("accelerator", "done")
    assert entry["device_ns"] > 0
    end()


def test_the_flight_log_has_times_of_the_device(monkeypatch):
    monkeypatch.setenv("LIBDDP_NCCL_TIMING", "1")
    ranks.run(timed, 2)


def names_the_culprit():
    device = begin()
    libddp.all_reduce(torch.ones(1, device=device))
    if libddp.get_rank() == 1:
        mock_nccl.reset()
        mock_nccl.fail("all_reduce", 1, mock_nccl.SYSTEM_ERROR)
    for _ in range(1000):
        libddp.all_reduce(torch.ones(1, device=device))
        torch.fakegpu.synchronize()


def test_errors_of_nccl_have_their_classes():
    outcomes = ranks.launch(names_the_culprit, 2)
    assert outcomes[1].error == "DeviceError"
    assert "unhandled system error" in outcomes[1].message
    assert outcomes[0].error == "PeerError"
    assert "rank 1" in outcomes[0].message


def handles_by_number(box, turn, numbers):
    """Of the processes with these numbers, told over a store of their launcher's."""
    box.set(f"{turn}/{os.environ['RANK']}", dist._get_reconfigure_handle())
    return [box.get(f"{turn}/{number}").decode() for number in numbers]


def other_members():
    me = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    box = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    device = begin(store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    for turn, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0])):
        if me not in members:
            continue
        dist._reconfigure(turn, handles_by_number(box, turn, members)).wait()
        assert dist.get_rank() == members.index(me)
        tensor = torch.full((4,), float(me), device=device)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(sum(members))] * 4
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.tolist() == [float(sum(members) * len(members))] * 4
        assert mock_nccl.live().communicators == 1  # of this membership
    end()


needs_reconfigure = pytest.mark.skipif(
    not _init._CAN_RECONFIGURE, reason="this torch has no reconfigure"
)


@needs_reconfigure
def test_the_members_change():
    ranks.run(other_members, 3)
