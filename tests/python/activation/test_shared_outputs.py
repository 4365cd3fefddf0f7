"""Outputs of a block that share memory, changed in place: torch's numbers or an error."""

import pytest
import torch
from libddp.utils.checkpoint import checkpoint, checkpoint_module
from reentrant_calls import FORMS, Module, reentrant, torchs
from torch import nn

OURS = pytest.mark.parametrize("call", FORMS)


def gives(*views):
    """A block whose first output is new; each of `views` makes another one of it."""

    def block(x):
        h = x.sin()
        return h, *(view(h) for view in views)

    return block


def of_input(*views):
    return lambda x: (x.sin(), *(view(x) for view in views))


def change_first(outputs):
    outputs[0].mul_(2)


def change_second(outputs):
    outputs[1].mul_(2)


BLOCKS = {
    "the same twice": gives(lambda h: h),
    "the same three times": gives(lambda h: h, lambda h: h),
    "a view": gives(lambda h: h.flatten()),
    "two views": lambda x: (lambda h: (h[0], h[1]))(x.sin()),
    "two equal views": lambda x: (lambda h: (h.t(), h.t()))(x.sin()),
    "one view twice": lambda x: (lambda v: (v, v))(x.sin().t()),
    "parts of a split": lambda x: x.sin().chunk(2),
    "the input": of_input(lambda x: x),
    "the input twice": lambda x: (x, x),
    "a view of the input": of_input(lambda x: x.t()),
    "two views of the input": lambda x: (x[0], x[1]),
    "a view of a view": gives(lambda h: h.t()[0]),
}


def found_or_error(step):
    try:
        return step(), None
    except RuntimeError as error:
        return None, error


@OURS
@pytest.mark.parametrize("change", [None, change_first, change_second])
@pytest.mark.parametrize("name", BLOCKS)
def test_numbers_are_those_without_checkpointing_or_there_is_an_error(call, change, name):
    def step(call):
        a = torch.tensor([[0.5, 1.0], [1.5, 2.0]], requires_grad=True)
        x = a * 1
        outputs = call(BLOCKS[name], x)
        if change:
            change(outputs)
        sum(output.pow(2).sum() for output in (*outputs, x)).backward()
        return a.grad

    expected, is_refused = found_or_error(lambda: step(torchs))
    found, error = found_or_error(lambda: step(call))
    if error is not None:
        assert is_refused is not None, error
        assert "inplace" in str(error) or "modified" in str(error)
    else:
        right = step(lambda function, x: function(x)) if is_refused else expected
        torch.testing.assert_close(found, right)


@OURS
def test_one_tensor_given_twice_is_one_tensor(call):
    x = torch.zeros(2, requires_grad=True)
    h, g = call(lambda x: (lambda h: (h, h))(x.exp()), x)
    assert h is g
    h *= 3
    (h * g).sum().backward()
    assert x.grad.tolist() == [18.0, 18.0]


@OURS
def test_a_view_that_nobody_shares_may_be_changed(call):
    """torch refuses it; many a block ends with a view (a linear layer's, of three dimensions)."""
    x = torch.ones(2, 3, requires_grad=True)
    out = call(lambda x: x.exp().t(), x)
    out *= 2
    out.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())


@OURS
def test_an_input_without_gradient_that_is_handed_through_stays_as_it_was(call):
    x, mask = torch.ones(3, requires_grad=True), torch.ones(3)
    _, same = call(lambda x, mask: (x * mask, mask), x, mask)
    assert not mask.requires_grad
    assert mask.grad_fn is None
    with pytest.raises(RuntimeError, match="view"):
        same.mul_(2)


@OURS
def test_a_parameter_that_is_handed_through_is_not_changed_in_secret(call):
    block = nn.Linear(2, 2)
    module = Module(lambda x: (block(x), block.weight))
    module.block = block
    x = torch.ones(1, 2, requires_grad=True)
    if call is reentrant:
        _, weight = checkpoint(module, x, use_reentrant=True)
    else:
        _, weight = checkpoint_module(module, x)
    assert block.weight.is_leaf
    with pytest.raises(RuntimeError, match="view"):
        weight.mul_(2)


@OURS
def test_a_view_of_what_the_block_keeps(call):
    """Changing it changes the block, whose second run would be another."""
    table = torch.ones(2, 2)
    x = torch.ones(2, 2, requires_grad=True)
    out, view = call(lambda x: (x * table, table.t()), x)
    view.mul_(2)
    with pytest.raises(RuntimeError, match="output 1 has been modified by an inplace operation"):
        (out.sum() + view.sum()).backward()


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "function", [torch.sin, lambda x: x, lambda x: x.sin().t(), lambda x: (x.sin(), x)]
)
def test_outputs_keep_their_class(function):
    def step(call):
        a = torch.tensor([[0.5, 1.0]], requires_grad=True)
        outputs = call(function, (a * 1).as_subclass(Marked))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.sum() for output in outputs).backward()
        return [type(output) for output in outputs], a.grad

    classes, gradient = step(reentrant)
    expected, expected_gradient = step(torchs)
    assert classes == expected
    assert torch.equal(gradient, expected_gradient)


@OURS
def test_the_second_run_sees_the_class_of_the_inputs(call):
    seen = []

    def block(x, y):
        seen.append((type(x), type(y)))
        return x * y if isinstance(x, Marked) else x

    x = torch.ones(2, requires_grad=True)
    out = call(block, x.as_subclass(Marked), torch.full((2,), 3.0))
    # From a tensor of the class, torch runs the whole backward pass without classes.
    out.as_subclass(torch.Tensor).sum().backward()
    assert seen == [(Marked, torch.Tensor)] * 2
    assert x.grad.tolist() == [3.0, 3.0]
