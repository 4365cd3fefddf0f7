"""set_all_reduce_hook: averages over replicas that fully_shard does not know, beside HSDP."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from libddp.errors import ArgumentError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

BFLOAT16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def mesh_of_all():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def put_hook(model, hook):
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(hook)


def averaging(group, seen):
    def hook(reduced):
        seen.append((reduced.dtype, reduced.dim()))
        dist.all_reduce(reduced, dist.ReduceOp.AVG, group=group)

    return hook


def backward(model):
    torch.manual_seed(3)  # dropout
    logits, _ = model(models.tokens(0))
    logits.square().mean().backward()


def trained(model, steps=3):
    models.train(model, steps)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def assert_close(found, wanted):
    assert list(found) == list(wanted)
    for name in found:  # sums of four numbers, in two orders
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def check_it_averages_as_hsdp():
    mesh = mesh_of_all()
    for options in ({}, BFLOAT16):
        seen = []
        model = models.shard(mesh=mesh["shard"], **options)
        put_hook(model, averaging(mesh.get_group("replicate"), seen))
        assert_close(trained(model), trained(models.shard(mesh=mesh, **options)))
        assert set(seen) == {(torch.float32, 1)}


def check_passes_without_synchronisation():
    mesh, seen = mesh_of_all(), []
    model = models.shard(mesh=mesh["shard"])
    put_hook(model, averaging(mesh.get_group("replicate"), seen))
    model.set_requires_gradient_sync(False)
    backward(model)
    assert not seen
    model.set_requires_gradient_sync(True)
    backward(model)
    assert seen


def check_behind_the_all_reduce_of_hsdp():
    """What it does to the average is in the gradient; taken away, nothing is."""
    mesh = mesh_of_all()
    plain, hooked = models.shard(mesh=mesh), models.shard(mesh=mesh)
    put_hook(hooked, lambda reduced: reduced.mul_(2))
    for factor in (2, 1):
        for model in (plain, hooked):
            model.zero_grad()
            backward(model)
        for one, other in zip(hooked.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor() * factor)
        put_hook(hooked, None)


def check_divided_by_a_factor():
    mesh = mesh_of_all()
    plain, hooked = models.shard(mesh=mesh), models.shard(mesh=mesh)
    put_hook(hooked, lambda reduced: None)
    for model in (plain, hooked):
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(3.0)
        backward(model)
    for one, other in zip(hooked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())


def check_what_is_refused():
    mesh = mesh_of_all()
    replicated = models.shard(mesh=mesh)
    with pytest.raises(ArgumentError, match="leave out stream"):
        replicated.set_all_reduce_hook(print, stream=object())
    with pytest.raises(ArgumentError, match="5 is no function"):
        replicated.set_all_reduce_hook(5)


results, test_on_four_ranks = checks.suite(globals(), 4)
