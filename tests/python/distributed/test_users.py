"""torch's own users of torch.distributed, and others', on libddp's group."""

import importlib.util
import os

import checks
import pytest
import torch
import torch.distributed as dist
from libddp.utils.data.distributed import DistributedSampler
from torch.utils.data import TensorDataset

from libddp import distributed as ddp_dist


def run_all():
    ddp_dist.init_process_group("gloo")
    found = checks.run(globals())
    ddp_dist.destroy_process_group()
    return found


results = checks.fixture(run_all, 2)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def train(wrapped, group_size=2, steps=5):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + ddp_dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(6, 8)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in wrapped.parameters()]


def check_torch_ddp_gives_gloos_bits():
    gloo = dist.new_group(backend="gloo")
    ours = train(torch.nn.parallel.DistributedDataParallel(model()))
    theirs = train(torch.nn.parallel.DistributedDataParallel(model(), process_group=gloo))
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    dist.destroy_process_group(gloo)


def check_torch_ddp_with_sparse_gradients_and_hooks():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    wrapped = torch.nn.parallel.DistributedDataParallel(embedding)
    rank = ddp_dist.get_rank()
    wrapped(torch.tensor([rank, 5])).sum().backward()
    grad = embedding.weight.grad.to_dense()
    assert grad[5].eq(1).all()
    assert grad[0].eq(0.5).all()
    assert grad[1].eq(0.5).all()

    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = torch.nn.parallel.DistributedDataParallel(model())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    weights = train(wrapped)
    others = [torch.empty_like(weights[0]) for _ in range(2)]
    ddp_dist.all_gather(others, weights[0])
    assert others[0].equal(others[1])


def check_distributed_sampler():
    data = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(data, shuffle=False)
    assert (sampler.rank, sampler.num_replicas) == (ddp_dist.get_rank(), 2)
    assert list(sampler) == list(range(ddp_dist.get_rank(), 10, 2))


def check_distributed_checkpoint():
    import torch.distributed.checkpoint as dcp

    box = [None]
    if ddp_dist.get_rank() == 0:
        import tempfile

        box = [tempfile.mkdtemp(prefix="dcp-")]
    ddp_dist.broadcast_object_list(box, src=0)
    mine = f"rank{ddp_dist.get_rank()}"
    state = {"shared": torch.arange(6.0), mine: torch.full((3,), ddp_dist.get_rank() + 1.0)}
    dcp.save(state, checkpoint_id=box[0])
    loaded = {"shared": torch.zeros(6), mine: torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=box[0])
    assert all(loaded[key].equal(state[key]) for key in state)
    ddp_dist.barrier()
    if ddp_dist.get_rank() == 0:
        import shutil

        shutil.rmtree(box[0])


def check_device_mesh_and_dtensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = ddp_dist.init_device_mesh("cpu", (2,))
    assert ddp_dist.native(mesh.get_group()).size() == 2
    whole = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert sharded.to_local().shape == (2, 3)
    assert sharded.full_tensor().equal(whole)
    assert (sharded * 2).redistribute(mesh, [Replicate()]).to_local().equal(whole * 2)


def check_torch_fsdp2():
    from torch.distributed.fsdp import fully_shard

    wrapped = model()
    fully_shard(wrapped, mesh=ddp_dist.init_device_mesh("cpu", (2,)))
    sharded = [p.full_tensor() for p in train(wrapped)]
    plain = train(torch.nn.parallel.DistributedDataParallel(model()))
    for a, b in zip(sharded, plain, strict=True):
        torch.testing.assert_close(a, b)


def check_accelerate():
    if importlib.util.find_spec("accelerate") is None:
        return  # reported as a skip below
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index) == (2, ddp_dist.get_rank())
    wrapped, optimizer = accelerator.prepare(model(), torch.optim.SGD(model().parameters(), 0.1))
    accelerator.backward(wrapped(torch.randn(2, 8)).sum())
    optimizer.step()
    gathered = accelerator.gather(torch.tensor([ddp_dist.get_rank()]))
    assert gathered.tolist() == [0, 1]


def check_debug_wrapper():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts torch's wrapper around our backend."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = ddp_dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    assert ddp_dist.native(group).size() == 2
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    ddp_dist.all_reduce(tensor, group=group)
    assert tensor.eq(4).all()


@pytest.mark.parametrize("name", checks.names(globals()))
def test_on_two_ranks(results, name):
    if name == "accelerate" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    checks.verify(results, name)
