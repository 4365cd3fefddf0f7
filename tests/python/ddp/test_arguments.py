"""Arguments of DistributedDataParallel: devices, meshes, buffers, and what is without effect."""

import copy
import os
import warnings

import checks
import ddp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_models import is_equal_on_all_ranks, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

RANK = int(os.environ.get("RANK", 0))


def x():
    return torch.full((2, 16), 0.1 * (RANK + 1))


def check_devices_in_any_form():
    for devices in (None, [], 0, [3], (1,), "cuda:0", ["cuda"], torch.device("cuda", 0), [None]):
        model = wrap(models.Mlp(layers=1), device_ids=devices, output_device=devices)
        assert model.device_ids is None
        assert model.output_device is None
        assert model.device_type == "cpu"
    for name in ("device_ids", "output_device"):
        with pytest.raises(ValueError, match=f"{name} can only be None or contain a single"):
            wrap(**{name: [0, 1]})
        with pytest.raises(ValueError, match=f"{name} is 1.5, which names no device"):
            wrap(**{name: 1.5})


def check_device_mesh_of_one_dimension():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    model = wrap(device_mesh=mesh)
    assert model.device_mesh is mesh
    assert model.process_group is mesh.get_group(0)
    model(x()).sum().backward()
    assert is_equal_on_all_ranks(model.module.layers[0].weight.grad)


def check_meshes_that_do_not_fit():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="both process_group and device_mesh"):
            wrap(device_mesh=mesh, process_group=dist.group.WORLD)
        with pytest.raises(kind, match="Only 1D device mesh is supported"):
            wrap(device_mesh=init_device_mesh("cpu", (2, 1)))
        with pytest.raises(kind, match="init_device_mesh"):
            wrap(device_mesh=object())


class Counter(nn.Module):
    """A buffer that each rank moves by another amount."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.register_buffer("count", torch.tensor(10.0 * RANK))

    def forward(self, value):
        self.count += RANK + 1
        return self.layer(value)


def counts(ddp_class, steps=3, **arguments):
    """The buffer after wrapping and after each step."""
    group = {"process_group": models.gloo()} if ddp_class is TorchDDP else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ddp_class(Counter(), **arguments, **group)
    seen = [model.module.count.item()]
    for _ in range(steps):
        model(x()).sum().backward()
        seen.append(model.module.count.item())
    return seen


def check_buffers_as_in_torch():
    for arguments in ({}, {"broadcast_buffers": True}, {"broadcast_buffers": False}):
        assert counts(models.libddp_ddp(), **arguments) == counts(TorchDDP, **arguments), arguments
    assert counts(models.libddp_ddp(), broadcast_buffers=False)[0] == 10.0 * RANK


def check_forward_sync_buffers():
    ours = models.libddp_ddp()
    assert counts(ours, forward_sync_buffers=True) == counts(TorchDDP)
    # At construction all the same, then never.
    assert counts(ours, forward_sync_buffers=False) == [step * (RANK + 1) for step in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wrap(broadcast_buffers=False).forward_sync_buffers is False
        assert wrap(forward_sync_buffers=False, broadcast_buffers=False).broadcast_buffers is False
        with pytest.raises(FutureWarning, match="broadcast_buffers=True is ignored"):
            wrap(forward_sync_buffers=False, broadcast_buffers=True)


def check_buffers_may_be_switched_later():
    model = wrap(Counter(), forward_sync_buffers=False)
    model(x()).sum().backward()
    assert not is_equal_on_all_ranks(model.module.count)
    model.broadcast_buffers = True
    assert model.forward_sync_buffers is True
    assert model.will_sync_module_buffers()
    model._sync_buffers()
    assert is_equal_on_all_ranks(model.module.count)


def check_buffers_of_other_shapes_are_local_without_broadcast():
    """torch compares no buffers, so rank-local ones may differ in everything."""
    net = models.Mlp()
    net.register_buffer("mine", torch.zeros(RANK + 1))
    model = wrap(net, broadcast_buffers=False)
    model(x()).sum().backward()
    assert model.module.mine.numel() == RANK + 1


def check_arguments_without_effect():
    plain = wrap(copy.deepcopy(net := models.Mlp()))
    other = wrap(net, batched_grad_copy=True, lazy_bucket_allocation=True, check_reduction=True)
    assert (other.batched_grad_copy, other.lazy_bucket_allocation) == (True, True)
    assert (plain.batched_grad_copy, plain.lazy_bucket_allocation) == (False, False)
    for model in (plain, other):
        model(x()).sum().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def check_sync_batch_norm_needs_a_gpu():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(models.ConvNet())
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="only work with GPU modules: 'norm'"):
            wrap(net)


def check_ignored_names_leave_marks():
    net = models.ConvNet()
    ignored = ["out.weight", "norm.running_mean"]
    models.drop_in_ddp()._set_params_and_buffers_to_ignore_for_model(net, ignored)
    assert net.out.weight._ddp_ignored
    assert net.norm.running_mean._ddp_ignored
    net.norm.running_mean.fill_(RANK)
    model = models.wrap_in_torchs_place(net)
    assert model.parameters_to_ignore == set(ignored)
    assert net.norm.running_mean[0] == RANK
    assert "norm.running_mean" not in model.named_module_buffers
    names = [n for n, _ in model._get_data_parallel_params(net, named_params=True)]
    assert "out.weight" not in names
    assert "out.bias" in names
    assert len(list(model._get_data_parallel_params(net))) == len(model._module_parameters)


results, test_on_every_rank = checks.suite(globals(), 2)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, value):
        return self.down(torch.relu(self.up(value)))


def data_of(replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 + replica))


def train(model, batches, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (sum((model(batch) - batch).pow(2).mean() for batch in batches) / len(batches)).backward()
        optimizer.step()
    return model


def data_and_tensor_parallel():
    """A 2 x 2 mesh: two replicas, each in two pieces; the largest distance to one whole model."""
    from libddp.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    init_process_group("libddp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    net = TwoLayers()
    whole = train(copy.deepcopy(net), [data_of(0), data_of(1)])
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = models.wrap_in_torchs_place(net, device_mesh=mesh["dp"])
    mine = net.up.weight  # a local tensor; torch puts a DTensor in its place in each forward
    train(model, [data_of(mesh["dp"].get_local_rank())])
    num_tensors = model._get_ddp_logging_data()["num_parameter_tensors"]
    part = mesh["tp"].get_local_rank()
    expected = whole.up.weight.chunk(2, dim=0)[part]
    return (mine - expected).abs().max().item(), model.process_group.size(), num_tensors


def test_slice_of_a_mesh_with_tensor_parallelism():
    for distance, size, num_tensors in ranks.run(data_and_tensor_parallel, 4):
        assert size == 2
        assert num_tensors == 4
        assert distance < 1e-6
