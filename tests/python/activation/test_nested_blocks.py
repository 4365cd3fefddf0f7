"""Blocks within blocks, where the inner one uses tensors of the outer one that it is not given."""

import pytest
import torch
from reentrant_calls import by_module, reentrant, torchs


def given(call, a, b):
    return call(lambda u, v: torch.tanh(u) * v, a, b)


def captured_input(call, a, b):
    return call(lambda u: torch.tanh(u) * b, a)


def captured_twice(call, a, b):
    return call(lambda u: torch.tanh(u * a) + a, a) * b


def captured_result(call, a, b):
    product = a * b
    return call(lambda u: torch.tanh(u) * product, a.exp())


def captured_and_handed_through(call, a, b):
    return call(lambda u: torch.tanh(u) * b, a) + b


def two_inner_ones(call, a, b):
    return call(lambda u: torch.tanh(u) * b, a) + call(torch.sin, a)


def one_deeper(call, a, b):
    return call(lambda u: call(lambda v: torch.tanh(v) * b * u, a), b)


BODIES = (
    given, captured_input, captured_twice, captured_result, captured_and_handed_through,
    two_inner_ones, one_deeper,
)  # fmt: skip


def gradients(outer, inner, body, has_history):
    """Of leaves that lead to the blocks' inputs, directly or through a graph that is freed."""
    leaves = [torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(0.5, 2, 6).view(2, 3)]
    for leaf in leaves:
        leaf.requires_grad_(True)
    x, z = [leaf.exp() if has_history else leaf for leaf in leaves]
    for _ in range(2):
        x = outer(lambda a, b: body(inner, a, b), x, z)
    (x.square().mean() + z.sum()).backward()
    return [leaf.grad for leaf in leaves]


def plain(function, *args):
    return function(*args)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(reentrant, reentrant), (by_module, reentrant), (torchs, reentrant)],
    ids=lambda call: call.__name__,
)
def test_gradients_are_those_without_blocks(outer, inner, body, has_history):
    found = gradients(outer, inner, body, has_history)
    for a, b in zip(found, gradients(plain, plain, body, has_history), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("body", BODIES)
def test_reentrant_blocks_give_torchs_bits(body):
    found = gradients(reentrant, reentrant, body, has_history=True)
    for a, b in zip(found, gradients(torchs, torchs, body, has_history=True), strict=True):
        assert torch.equal(a, b)
