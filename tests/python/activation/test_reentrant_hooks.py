"""Hooks within a block: those on its input see the block's part of the gradient, as torch's do."""

import pytest
import torch
from reentrant_calls import FORMS, torchs
from torch.autograd.graph import register_multi_grad_hook


def block_with(hook):
    """A block that shows `hook` its input, and a tensor of its own, in the recomputation."""

    def block(x):
        middle = x.sin()
        if torch.is_grad_enabled():
            hook(x, middle)
        return middle * x

    return block


def residual_step(call, block, is_leaf=False):
    a = torch.tensor([0.5, 1.0], requires_grad=True)
    x = a if is_leaf else a * 1
    (x + call(block, x)).sum().backward()
    return a.grad


OURS = pytest.mark.parametrize("call", FORMS)
LEAF = pytest.mark.parametrize("is_leaf", [False, True])


@OURS
@LEAF
def test_a_hook_changes_the_blocks_part_only(call, is_leaf):
    block = block_with(lambda x, middle: x.register_hook(lambda g: g * 2))
    expected = residual_step(torchs, block, is_leaf)
    assert torch.equal(residual_step(call, block, is_leaf), expected)


@OURS
@LEAF
def test_what_an_input_retains_is_the_blocks_part(call, is_leaf):
    kept = []

    def keep(x, middle):
        x.retain_grad()
        kept.append(x)

    total = residual_step(torchs, block_with(keep), is_leaf)
    assert torch.equal(residual_step(call, block_with(keep), is_leaf), total)
    assert torch.equal(kept[1].grad, kept[0].grad)
    assert torch.equal(kept[0].grad, total - 1)


@OURS
@LEAF
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("of", ["input", "middle", "both"])
def test_hooks_on_several_tensors(call, is_leaf, mode, of):
    seen = []

    def register(x, middle):
        tensors = {"input": (x,), "middle": (middle, middle), "both": (x, middle)}[of]
        register_multi_grad_hook(tensors, seen.append, mode=mode)

    total = residual_step(torchs, block_with(register), is_leaf)
    assert torch.equal(residual_step(call, block_with(register), is_leaf), total)
    expected, found = seen
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@OURS
def test_hooks_last_for_one_backward_pass(call):
    """And those that the outer graph has on the same tensor stay what they were."""
    outer, inner = [], []
    a = torch.ones(2, requires_grad=True)
    x = a + 0
    x.register_hook(outer.append)
    out = call(block_with(lambda y, middle: y.register_hook(inner.append)), x)
    (x + out).sum().backward(retain_graph=True)
    (x + out).sum().backward()
    (x * 3).sum().backward()
    assert len(inner) == 2
    assert torch.equal(inner[0], inner[1])
    part = inner[0]
    assert [g.tolist() for g in outer] == [(part + 1).tolist()] * 2 + [[3.0, 3.0]]


@OURS
def test_hooks_on_the_input_of_a_block_within_a_block(call):
    def nested(call):
        inner = block_with(lambda x, middle: x.register_hook(lambda g: g * 3))
        return lambda x: call(inner, x) + x

    block = nested(torchs)
    expected = residual_step(torchs, block)
    assert torch.equal(residual_step(call, nested(call)), expected)


@OURS
def test_two_inputs_one_of_them_hooked_and_one_handed_through(call):
    def block(x, y):
        if torch.is_grad_enabled():
            y.register_hook(lambda g: g * 10)
        return x, y * x, y

    def step(call):
        a = torch.tensor([0.5, 1.0], requires_grad=True)
        b = torch.tensor([2.0, 3.0], requires_grad=True)
        first, second, third = call(block, a * 1, b)
        (first + second * third).sum().backward()
        return a.grad, b.grad

    for expected, found in zip(step(torchs), step(call), strict=True):
        assert torch.equal(found, expected)
