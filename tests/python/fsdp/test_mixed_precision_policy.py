"""MixedPrecisionPolicy: the gradients of the installed torch's fully_shard, on Gloo beside."""

import dataclasses

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from libddp.errors import ArgumentError
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

BF16 = torch.bfloat16
HAS_OVERRIDES = "param_dtype_override_fn" in {
    field.name for field in dataclasses.fields(MixedPrecisionPolicy)
}


class Again(nn.Module):
    """Two gradients of one parameter in a pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class WideGradient(torch.autograd.Function):
    """x w', whose gradient of w is of float32."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, grad.float().T @ x.float()


class WideLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return WideGradient.apply(x, self.weight)


def net():
    """RMSNorm's backward gives gradients of its weight in float32."""
    return nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), Again())


def batch(number):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(64, 8, generator=generator)


def gradients(model, passes):
    for number in range(passes):
        model.set_requires_gradient_sync(number == passes - 1)
        model(batch(number).to(next(model.parameters()).dtype)).float().pow(2).mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def ours(model, **how):
    return models.libddp_fsdp().fully_shard(model, **how)


def theirs(model, **how):
    return models.theirs(model, [], **how)


def assert_alike(policy, passes=1, make=net, **how):
    found = []
    for shard in (ours, theirs):
        torch.manual_seed(0)
        found.append(gradients(shard(make(), mp_policy=policy, **how), passes))
    for own, other in zip(*found, strict=True):
        assert own.dtype == other.dtype
        assert torch.equal(own, other), (policy, passes)


def check_gradients_are_torchs():
    for reduce_dtype in (None, torch.float32, BF16):
        for passes in (1, 3):
            policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
            assert_alike(policy, passes)


def check_gradients_of_low_parameters_are_torchs():
    for reduce_dtype in (None, torch.float32):
        assert_alike(MixedPrecisionPolicy(reduce_dtype=reduce_dtype), make=lambda: net().bfloat16())


def check_gradients_of_columns_are_torchs():
    for reduce_dtype in (None, torch.float32, BF16):
        for passes in (1, 3):
            policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
            assert_alike(policy, passes, WideLinear, shard_placement_fn=lambda _: Shard(1))


def check_hooks_see_outputs_as_torchs_do():
    """One from before the sharding sees the computation's dtype, one from after it the caller's."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)
    found = []
    for shard in (ours, theirs):
        layer, seen = nn.Linear(8, 8), []
        layer.register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output.dtype)
        )
        model = shard(layer, mp_policy=policy)
        model.register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output.dtype)
        )
        seen.append(model(torch.ones(2, 8)).dtype)
        found.append(seen)
    assert found[0] == found[1] == [BF16, torch.float32, torch.float32]


def keep_norms(parameter):
    return parameter.dtype if parameter.dim() == 1 else None


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8)

    def forward(self, x):
        self.seen = (x.dtype, self.layer.weight.dtype, self.norm.weight.dtype)
        return self.norm(self.layer(x).float())


if HAS_OVERRIDES:

    def check_parameters_that_keep_their_dtype():
        for reduce_dtype in (None, torch.float32, BF16):
            policy = MixedPrecisionPolicy(
                param_dtype=BF16, reduce_dtype=reduce_dtype, param_dtype_override_fn=keep_norms
            )
            assert_alike(policy, make=Seen)
        model = ours(Seen(), mp_policy=policy)
        model(batch(0))
        assert model.seen == (BF16, BF16, torch.float32)
        refused = MixedPrecisionPolicy(
            param_dtype=BF16, param_dtype_override_fn=lambda _: torch.float16
        )
        with pytest.raises(ValueError, match="param_dtype_override_fn must return None"):
            ours(Seen(), mp_policy=refused)

    def check_gradients_of_another_dtype_are_refused():
        fsdp = models.libddp_fsdp()
        for shard in (fsdp.fully_shard, fsdp.FullyShardedDataParallel):
            model = nn.Linear(4, 4)
            model.bias.grad_dtype = model.bias.dtype
            model.weight.grad_dtype = BF16
            with pytest.raises(ArgumentError, match=r"'weight' .* grad_dtype=torch.bfloat16"):
                shard(model)
            model = shard(nn.Linear(4, 4))
            next(model.parameters()).grad_dtype = BF16  # after wrapping
            with pytest.raises(ArgumentError, match=r"weight' .* grad_dtype=torch.bfloat16"):
                model(batch(0))


results, test_on_two_ranks = checks.suite(globals(), 2)
