"""summon_full_params with each of its arguments, beside torch's FSDP on Gloo."""

import contextlib
import warnings

import checks
import ddp_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Stack(nn.Module):
    """Two layers and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layers(x) * self.scale


def batch():
    return torch.arange(6.0).view(2, 3) + dist.get_rank()


def wrap(**arguments):
    policy = ModuleWrapPolicy({nn.Linear})
    return models.wrap(models.build(Stack), auto_wrap_policy=policy, **arguments)


def wrap_by_torch(**arguments):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        models.build(Stack),
        process_group=ddp_models.gloo(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        **arguments,
    )


def shapes(model):
    return {
        name: tuple(p.shape) for name, p in models.plain_names(model.named_parameters()).items()
    }


def gradients(model):
    named = models.plain_names(model.named_parameters())
    return {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}


def check_whole_gradients_are_torchs():
    found = {}
    for make in (wrap, wrap_by_torch):
        model = make()
        model(batch()).sum().backward()
        with type(model).summon_full_params(model, with_grads=True):
            found[make] = gradients(model)
            assert all(p.grad.shape == p.shape for p in model.parameters())
    assert list(found[wrap]) == list(found[wrap_by_torch])
    for name, gradient in found[wrap].items():
        torch.testing.assert_close(gradient, found[wrap_by_torch][name], msg=name)


def check_changed_gradients_are_kept_where_asked_for():
    for make in (wrap, wrap_by_torch):
        model = make()
        summon = type(model).summon_full_params
        model(batch()).sum().backward()
        with summon(model, with_grads=True):
            wanted = gradients(model)
            for parameter in model.parameters():
                parameter.grad.mul_(3)
        with summon(model, with_grads=True, writeback=False):
            for name, gradient in gradients(model).items():
                torch.testing.assert_close(gradient, 3 * wanted[name], msg=name)
            for parameter in model.parameters():
                parameter.grad.zero_()
        with summon(model, with_grads=True):
            for name, gradient in gradients(model).items():
                torch.testing.assert_close(gradient, 3 * wanted[name], msg=name)


def check_gradients_set_and_removed_inside():
    model = wrap()
    summon = type(model).summon_full_params
    with summon(model, with_grads=True):
        assert all(gradient is None for gradient in gradients(model).values())
        model.scale.grad = torch.arange(3.0)
    mine = torch.tensor(model.scale.grad.numel())
    assert model.scale.grad.shape == model.scale.shape
    dist.all_reduce(mine)
    assert mine == 3
    with summon(model, with_grads=True):
        assert model.scale.grad.tolist() == [0, 1, 2]
        model.scale.grad = None
    assert model.scale.grad is None
    model(batch()).sum().backward()
    model(batch()).sum().backward()
    assert model.scale.grad is not None


def check_a_training_step_on_whole_tensors():
    plain = models.build(Stack)
    for rank in range(2):
        (plain(torch.arange(6.0).view(2, 3) + rank).sum() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    model = wrap()
    model(batch()).sum().backward()
    with type(model).summon_full_params(model, with_grads=True):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)


def check_only_rank_0_sees_whole_parameters():
    whole = {name: tuple(p.shape) for name, p in Stack().named_parameters()}
    for make in (wrap, wrap_by_torch):
        model = make()
        model(batch()).sum().backward()
        before = shapes(model)
        with type(model).summon_full_params(
            model, rank0_only=True, writeback=False, with_grads=True
        ):
            inside = shapes(model)
            has_whole = {tuple(p.grad.shape) for p in model.parameters() if p.grad is not None}
        assert (inside == whole) == (dist.get_rank() == 0), make
        assert dist.get_rank() != 0 or has_whole == set(whole.values()), make
        assert shapes(model) == before, make


def check_recurse():
    whole = {name: tuple(p.shape) for name, p in Stack().named_parameters()}
    for make in (wrap, wrap_by_torch):
        model = make()
        with torch.no_grad():
            model(batch())
        summon = type(model).summon_full_params
        before = shapes(model)
        with summon(model, recurse=False):
            assert shapes(model) == {**before, "scale": (3,)}, make
        with summon(model.layers[0], writeback=False):
            inner = {f"layers.0.{n}": whole[f"layers.0.{n}"] for n in ("weight", "bias")}
            assert shapes(model) == {**before, **inner}, make
        with summon(model.layers, recurse=False):
            assert shapes(model) == before, make
        with summon(model.layers):
            assert shapes(model) == {**whole, "scale": before["scale"]}, make


def check_state_dicts_inside():
    model = wrap()
    wanted = models.build(Stack).state_dict()
    before = shapes(model)
    with type(model).summon_full_params(model, recurse=False):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)
        assert model.scale.shape == (3,)
    assert shapes(model) == before


def check_what_torch_refuses():
    from torch.distributed.fsdp import ShardingStrategy

    refused = [
        {"with_grads": True, "offload_to_cpu": True},
        {"writeback": True, "rank0_only": True},
    ]
    for make in (wrap, wrap_by_torch):
        model = make()
        for arguments in refused:
            with pytest.raises(NotImplementedError):
                type(model).summon_full_params(model, **arguments).__enter__()
        replica = make(sharding_strategy=ShardingStrategy.NO_SHARD)
        with pytest.raises(NotImplementedError):
            type(model).summon_full_params(replica, offload_to_cpu=True).__enter__()
    model = wrap()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with type(model).summon_full_params(model, offload_to_cpu=True):
            assert model.scale.shape == (3,)
    assert any("rank0_only=False" in str(w.message) for w in caught)
    with type(model).summon_full_params(
        model, offload_to_cpu=True, rank0_only=True, writeback=False
    ):
        assert (model.scale.shape == (3,)) == (dist.get_rank() == 0)
    from libddp.errors import ArgumentError

    with pytest.raises(ArgumentError, match=r"writeback=True and rank0_only=True.* Hint: pass"):
        models.libddp_fsdp().FullyShardedDataParallel.summon_full_params(
            wrap(), rank0_only=True
        ).__enter__()


def check_forward_inside():
    """A model that writes text between two steps; no rank waits for another."""
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    plain, x = models.build(Stack), batch()
    low = MixedPrecision(param_dtype=torch.bfloat16)
    kinds = [
        {"sharding_strategy": strategy}
        for strategy in ShardingStrategy
        if "HYBRID" not in strategy.name
    ]
    for arguments in (*kinds, {"mixed_precision": low}):
        model = wrap(**arguments)
        summon = type(model).summon_full_params
        for recurse in (True, False) if arguments in kinds else (True,):
            with summon(model, recurse=recurse), torch.no_grad():
                for _ in range(1 + dist.get_rank() * recurse):
                    assert model.module(x).equal(plain(x)), arguments
                    assert model(x).equal(plain(x)), arguments
                    assert model.module.layers(x).equal(plain.layers(x)), arguments
        with summon(model, rank0_only=True, writeback=False), torch.no_grad():
            if dist.get_rank() == 0:
                assert model.module(x).equal(plain(x))
            else:
                with pytest.raises(RuntimeError, match=r"rank0_only=True\) on another rank"):
                    model(x)
        with summon(model, writeback=False):
            inside = model.layers(x).sum()
        with pytest.raises(RuntimeError, match="ran inside of summon_full_params"):
            inside.backward()
        model(x).sum().backward()


def check_another_shape_inside():
    model = wrap()
    summon = type(model).summon_full_params
    before = model.state_dict()
    text = r"'scale' was given the shape \[4\], and is \[3\]"
    with pytest.raises(RuntimeError, match=text), summon(model):
        model.scale.data = torch.ones(4)
    with contextlib.suppress(ValueError), summon(model):
        model.scale.data.zero_()
        raise ValueError("not kept")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def check_names_are_those_of_a_walk_over_the_modules():
    """As scripts choose which parameters get weight decay; under summon_full_params plain ones."""
    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    model = fsdp(fsdp(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))

    def walked(module, registry):
        for name, child in module.named_children():
            yield from (f"{name}.{below}" for below in walked(child, registry))
        yield from registry(module)

    parameters = sorted(walked(model, lambda module: module._parameters))
    assert parameters == sorted(name for name, _ in model.named_parameters())
    assert all(name.startswith("_fsdp_wrapped_module.") for name in parameters)
    buffers = sorted(walked(model, lambda module: module._buffers))
    assert buffers == sorted(name for name, _ in model.named_buffers())
    with fsdp.summon_full_params(model):
        assert [n for n, _ in model.named_parameters()] == [
            "0.weight",
            "0.bias",
            "1.weight",
            "1.bias",
        ]
        assert "1.running_mean" in dict(model.named_buffers())


results, test_summon = checks.suite(globals(), 2)
