"""delay_all_reduce_named_params: averaged only when the parameter to hook gets its gradient."""

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import Mlp, libddp_ddp
from torch import nn


class Shared(nn.Module):
    """A part that several passes use, and one layer that only the last pass reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8 + dist.get_rank())  # wrapping has to make the ranks equal
        self.shared = Mlp(2)
        self.last = nn.Linear(16, 1)


def data(seed):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, 16, generator=generator)


def wrapped(**options):
    model = Shared()
    named = [(f"shared.{name}", p) for name, p in model.shared.named_parameters()]
    ddp = libddp_ddp()(
        model,
        delay_all_reduce_named_params=named,
        param_to_hook_all_reduce=model.last.weight,
        **options,
    )
    return ddp, [p for _, p in named]


def averaged(gradients):
    result = [gradient.clone() for gradient in gradients]
    for gradient in result:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    return result


def assert_close(parameters, expected):
    for p, gradient in zip(parameters, expected, strict=True):
        assert torch.equal(p.grad, gradient)


def check_all_ranks_start_from_rank_0():
    model, _ = wrapped()
    for p in model.parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p)


def check_the_wrapper_has_no_parameter_of_its_own():
    """As in torch: state dicts and optimizers find the module's, in the module's order."""
    model, _ = wrapped()
    names = [f"module.{name}" for name, _ in Shared().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) == names


def check_local_until_the_trigger_fires():
    """Two passes stay local, the third averages all that has come."""
    model, delayed = wrapped(find_unused_parameters=True)
    local = [torch.zeros_like(p) for p in delayed]
    for step in range(2):
        loss = model.module.shared(data(step)).pow(2).mean()
        for total, g in zip(local, torch.autograd.grad(loss, delayed), strict=True):
            total += g
        model.module.shared(data(step)).pow(2).mean().backward()
        assert_close(delayed, local)
    model.module.forward = lambda x: model.module.last(model.module.shared(x))
    loss = model.module(data(2)).pow(2).mean()
    for total, g in zip(local, torch.autograd.grad(loss, delayed), strict=True):
        total += g
    model(data(2)).pow(2).mean().backward()
    assert_close(delayed, averaged(local))
    model.zero_grad()
    model(data(3)).pow(2).mean().backward()
    assert_close(model.parameters(), averaged([p.grad for p in model.parameters()]))


def check_no_sync_stays_local():
    model, delayed = wrapped()
    model.module.forward = lambda x: model.module.last(model.module.shared(x))
    with model.no_sync():
        model(data(0)).pow(2).mean().backward()
    before = [p.grad.clone() for p in delayed]
    averages = averaged(before)
    assert not torch.equal(before[0], averages[0]), "the ranks have data of their own"
    model.zero_grad()
    model(data(0)).pow(2).mean().backward()
    assert_close(delayed, averages)


def check_an_unused_delayed_parameter_keeps_none():
    model, delayed = wrapped()
    model.module.forward = lambda x: model.module.last(torch.tanh(model.module.shared.layers[0](x)))
    model(data(0)).pow(2).mean().backward()
    assert [p.grad is None for p in delayed] == [False, False, True, True]
    assert_close(delayed[:2], averaged([p.grad for p in delayed[:2]]))


def check_a_rank_without_gradient_counts_as_zero():
    model, delayed = wrapped()
    depth = 1 + dist.get_rank()

    def forward(x):
        for layer in model.module.shared.layers[:depth]:
            x = torch.tanh(layer(x))
        return model.module.last(x)

    model.module.forward = forward
    model(data(0)).pow(2).mean().backward()
    assert_close(delayed, averaged([p.grad for p in delayed]))
    mine = torch.tensor([1.0 if depth == 2 else 0.0])
    dist.all_reduce(mine)
    assert mine.item() == 1
    assert delayed[2].grad.abs().sum() > 0


def check_all_parameters_delayed():
    torch.manual_seed(dist.get_rank())
    inner = Mlp(2)
    model = libddp_ddp()(
        inner,
        delay_all_reduce_named_params=list(inner.named_parameters()),
        param_to_hook_all_reduce=inner.layers[0].weight,
    )
    for step in range(3):
        model.zero_grad()
        loss = inner(data(step)).pow(2).mean()
        expected = averaged(torch.autograd.grad(loss, list(inner.parameters())))
        model(data(step)).pow(2).mean().backward()
        assert_close(inner.parameters(), expected)


def check_bad_arguments():
    model = Shared()
    named = list(model.shared.named_parameters())
    with pytest.raises(ValueError, match="need to be set at the same time"):
        libddp_ddp()(model, delay_all_reduce_named_params=named)
    frozen = Shared().requires_grad_(False)
    model.last.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="param_to_hook_all_reduce does not require"):
        libddp_ddp()(
            model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.last.weight
        )
    with pytest.raises(ValueError, match=r"'last\.weight' does not require a gradient"):
        libddp_ddp()(
            model,
            delay_all_reduce_named_params=[("last.weight", frozen.last.weight)],
            param_to_hook_all_reduce=model.last.bias,
        )


results, test_delayed = checks.suite(globals(), 2)
