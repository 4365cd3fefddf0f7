"""What stands on the group: SyncBatchNorm, torch.distributed.nn, DTensor, tensor parallelism."""

import pytest
import torch
import torch.distributed as c10d
import torch.distributed.nn
from subject import DDP, DEVICE, IS_CUDA, IS_LIBDDP
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def values(*shape):
    torch.manual_seed(1)
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.skipif(not IS_CUDA and not IS_LIBDDP, reason="torch has it on CUDA alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sync_batch_norm(dtype):
    """On one rank it is a batch norm; the sums are taken in another order."""

    def trained(convert):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(DEVICE)
        if convert:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
            assert isinstance(net[1], nn.SyncBatchNorm)
        model = DDP(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
                model(values(4, 3, 16, 16)).square().mean().backward()
            optimizer.step()
        return [*net.parameters(), net[1].running_mean, net[1].running_var]

    if not IS_CUDA:
        pytest.skip("torch's SyncBatchNorm wants CUDA tensors")
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for found, wanted in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


FUNCTIONS = {
    "all_reduce": lambda x: c10d.nn.all_reduce(x),
    "broadcast": lambda x: c10d.nn.broadcast(x, 0),
    "all_gather": lambda x: c10d.nn.all_gather(x)[0],
    "reduce_scatter": lambda x: c10d.nn.reduce_scatter(torch.empty_like(x), [x]),
    "all_to_all_single": lambda x: c10d.nn.functional.all_to_all_single(torch.empty_like(x), x),
    "reduce": lambda x: c10d.nn.reduce(x, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_differentiable_functions(name):
    if not IS_CUDA and not IS_LIBDDP and "all_to_all" in name:
        pytest.skip("Gloo")
    x = values(6, 4).requires_grad_()
    y = FUNCTIONS[name](x)
    assert torch.equal(y, x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_functional_collectives():
    import torch.distributed._functional_collectives as functional

    x = values(6, 4)
    for y in (
        functional.all_reduce(x, "sum", c10d.group.WORLD),
        functional.all_gather_tensor(x, 0, c10d.group.WORLD),
        functional.reduce_scatter_tensor(x, "sum", 0, c10d.group.WORLD),
    ):
        assert torch.equal(functional.wait_tensor(y), x)


def test_dtensor():
    mesh = c10d.init_device_mesh(DEVICE.type, (1,))
    x = distribute_tensor(values(6, 4), mesh, [Shard(0)])
    assert isinstance(x, DTensor)
    assert torch.equal(x.full_tensor(), values(6, 4))
    assert torch.equal(x.redistribute(mesh, [Replicate()]).to_local(), values(6, 4))
    torch.testing.assert_close((x @ x.t()).full_tensor(), values(6, 4) @ values(6, 4).t())


def test_tensor_parallel():
    mesh = c10d.init_device_mesh(DEVICE.type, (1,))
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(DEVICE)
    wanted = net(values(4, 8))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = net(values(4, 8))
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(4)
    model = DDP(nn.Linear(8, 8).to(DEVICE))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    before = model.module.weight.detach().clone()
    model(values(4, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.module.weight)
