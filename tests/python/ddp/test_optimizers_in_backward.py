"""Optimizers that step inside the backward pass: the numbers of a plain loop."""

import copy
import os

import checks
import ddp_models as models
import pytest
import torch
import torch.distributed as dist
from ddp_models import wrap
from torch.distributed.optim import _apply_optimizer_in_backward

RANK = int(os.environ.get("RANK", 0))


def x(rank=None):
    generator = torch.Generator().manual_seed(20 + (RANK if rank is None else rank))
    return torch.randn(4, 16, generator=generator)


def plain_loop(net, make_optimizer, steps=4):
    """Both ranks' data in one process, averaged by hand."""
    optimizer = make_optimizer(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            (net(x(rank)).pow(2).mean() / 2).backward()
        optimizer.step()
    return list(net.parameters())


def assert_trained_alike(model, expected):
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, other)
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter)


def check_fused_optimizers():
    for optim, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ):
        net = models.Mlp()
        model = wrap(net, bucket_cap_mb=0.002)
        expected = plain_loop(copy.deepcopy(net), lambda p, o=optim, k=options: o(p, **k))
        model._register_fused_optim(optim, **options)
        for _ in range(4):
            model.zero_grad()
            model(x()).pow(2).mean().backward()
        assert_trained_alike(model, expected)


def check_fused_optimizer_of_some_parameters():
    net = models.Mlp()
    model = wrap(net)
    before = [p.detach().clone() for p in net.parameters()]
    model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=[net.layers[0].weight])
    model(x()).pow(2).mean().backward()
    changed = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    assert changed == [True] + [False] * 7
    with pytest.raises(RuntimeError, match="does not support overlapped DDP"):
        wrap()._register_fused_optim(torch.optim.LBFGS)


class Transposed(models.Mlp):
    """Weights that do not lie row by row."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.weight = torch.nn.Parameter(layer.weight.detach().t())


def check_gradients_that_are_no_views():
    for net in (models.Mlp(), Transposed()):
        model = wrap(net, bucket_cap_mb=0.002, gradient_as_bucket_view=False)
        expected = plain_loop(copy.deepcopy(net), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
        options = {"lr": 0.1, "momentum": 0.9}
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), options)
        for _ in range(4):
            model(x()).pow(2).mean().backward()
            assert all(p.grad is None for p in net.parameters())
        assert_trained_alike(model, expected)


def check_optimizers_in_backward():
    net = models.Mlp()
    model = wrap(net, bucket_cap_mb=0.002)
    expected = plain_loop(copy.deepcopy(net), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1, "momentum": 0.9})
    for _ in range(4):
        model(x()).pow(2).mean().backward()
        assert all(p.grad is None for p in net.parameters())
    assert_trained_alike(model, expected)


def check_optimizers_in_backward_of_some_parameters():
    net = models.Mlp()
    model = wrap(net)
    first, *others = net.parameters()
    expected = plain_loop(copy.deepcopy(net), lambda p: torch.optim.SGD(p, 0.1))
    _apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.1})
    optimizer = torch.optim.SGD(others, 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(x()).pow(2).mean().backward()
        assert first.grad is None
        assert all(p.grad is not None for p in others)
        optimizer.step()
    assert_trained_alike(model, expected)


def check_optimizers_in_backward_and_unused_parameters():
    """Used by one rank: stepped alike on both. Used by none: not stepped, weight decay or not."""
    net = models.Heads()
    model = wrap(net, find_unused_parameters=True)
    twin = copy.deepcopy(net)
    options = {"lr": 0.1, "weight_decay": 0.5}
    optimizer = torch.optim.SGD(twin.parameters(), **options)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), options)
    for _ in range(3):
        model(torch.ones(1, 4), RANK).sum().backward()
        optimizer.zero_grad()
        for rank in range(2):
            (twin(torch.ones(1, 4), rank).sum() / 2).backward()
        optimizer.step()
        assert all(p.grad is None for p in net.parameters())
    assert_trained_alike(model, list(twin.parameters()))


def check_optimizers_in_backward_with_accumulation():
    net = models.Mlp()
    model = wrap(net)
    expected = plain_loop(copy.deepcopy(net), lambda p: torch.optim.SGD(p, 0.1))
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    for _ in range(4):
        with model.no_sync():
            (model(x()) / 2**0.5).pow(2).mean().backward()
        (model(x()) / 2**0.5).pow(2).mean().backward()
    assert_trained_alike(model, expected)


def check_optimizers_in_backward_and_uneven_inputs():
    net = models.Mlp()
    model = wrap(net)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    with model.join():
        for _ in range(2 + RANK):
            model(x()).pow(2).mean().backward()
    assert_trained_alike(model, [p.detach().clone() for p in net.parameters()])


results, test_on_every_rank = checks.suite(globals(), 2)
