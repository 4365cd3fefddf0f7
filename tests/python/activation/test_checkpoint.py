"""checkpoint(use_reentrant=False): the gradients without it, to the bit, whatever a block does."""

import blocks
import pytest
import torch
from libddp.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_early_stop,
)
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def by(function, **settings):
    return lambda block, x: function(block, x, use_reentrant=False, **settings)


PLAIN = blocks.step(blocks.Stack())


@pytest.mark.parametrize(
    "call",
    [
        by(checkpoint),
        by(checkpoint, early_stop=False),
        by(checkpoint, determinism_check="none"),
        by(checkpoint, debug=True),
        by(torch_checkpoint),
        lambda block, x: checkpoint(use_reentrant=False)(block)(x),
        lambda block, x: checkpoint(lambda y: checkpoint(block, y, use_reentrant=False), x,
                                    use_reentrant=False),
    ],
    ids=["ours", "no early stop", "no check", "debug", "torch", "decorator", "nested"],
)  # fmt: skip
def test_gradients_are_those_without_checkpointing(call):
    blocks.assert_equal(blocks.step(blocks.Stack(call=call)), PLAIN)


def test_nested_two_deep_over_several_blocks():
    def call(block, x):
        def inner(y):
            return checkpoint(block, checkpoint(block, y, use_reentrant=False), use_reentrant=False)

        return checkpoint(inner, x, use_reentrant=False)

    plain = blocks.step(blocks.Stack(call=lambda block, x: block(block(x))))
    blocks.assert_equal(blocks.step(blocks.Stack(call=call)), plain)


def test_without_preserved_random_state_the_masks_differ():
    call = by(checkpoint, preserve_rng_state=False)
    torch.manual_seed(0)
    ours, plain = blocks.step(blocks.Stack(call=call)), PLAIN
    assert torch.equal(ours[0], plain[0])
    assert not torch.equal(ours[2], plain[2])


def test_the_outer_random_state_is_left_alone():
    x = torch.ones(4, 8, requires_grad=True)
    out = checkpoint(nn.Dropout(0.5), x, use_reentrant=False)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    out.sum().backward()
    assert torch.equal(torch.rand(3), expected)


def test_keyword_arguments_and_values_that_are_no_tensors():
    def block(x, table, *, weight, flag):
        y = x * weight if flag else x
        return {"sum": y + table["bias"], "flag": flag, "parts": [y, y * 2]}

    x, bias, weight = (torch.randn(3, requires_grad=True) for _ in range(3))
    results = []
    for function in (None, checkpoint):
        for tensor in (x, bias, weight):
            tensor.grad = None
        arguments = (block, x, {"bias": bias})
        if function is None:
            out = block(*arguments[1:], weight=weight, flag=True)
        else:
            out = function(*arguments, use_reentrant=False, weight=weight, flag=True)
        assert out["flag"] is True
        (out["sum"] * out["parts"][1]).sum().backward()
        results.append([t.grad.clone() for t in (x, bias, weight)])
    blocks.assert_equal(*results)


def test_inputs_without_gradient_and_no_inputs():
    linear = nn.Linear(3, 3)
    checkpoint(linear, torch.ones(2, 3), use_reentrant=False).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((3, 3), 2.0))
    linear.zero_grad()
    checkpoint(lambda: linear(torch.ones(2, 3)), use_reentrant=False).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((3, 3), 2.0))


def test_without_grad_the_block_only_runs():
    runs = []

    def block(x):
        runs.append(1)
        return x * 2

    with torch.no_grad():
        out = checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert not out.requires_grad
    assert len(runs) == 1


def test_several_backward_passes():
    model = blocks.Stack(call=by(checkpoint))
    torch.manual_seed(1)
    out = model(torch.randn(4, 8, requires_grad=True)).pow(2).mean()
    gradients = []
    for keep in (True, True, False):
        model.zero_grad()
        out.backward(retain_graph=keep)
        gradients.append([p.grad.clone() for p in model.parameters()])
    blocks.assert_equal(gradients[0], gradients[1])
    blocks.assert_equal(gradients[0], gradients[2])
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward()


def test_autograd_grad_of_a_part_and_of_second_order():
    def block(x):
        return (x**3).exp()

    x = torch.tensor([0.3, 0.5], requires_grad=True)
    results = []
    for call in (block, lambda y: checkpoint(block, y, use_reentrant=False)):
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        results.append([first.detach(), second])
    blocks.assert_equal(*results)


@pytest.mark.parametrize("where", ["around", "within"])
def test_autocast(where):
    def call(block, x):
        if where == "around":
            return checkpoint(block, x, use_reentrant=False)

        def within(y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return block(y).float()

        return checkpoint(within, x, use_reentrant=False)

    def plain(block, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x).float() if where == "within" else block(x)

    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
            torch.manual_seed(1)
            out = model(torch.randn(4, 8, requires_grad=True))
        out.float().pow(2).mean().backward()
        assert not torch.is_autocast_enabled("cpu")
        return [p.grad for p in model.parameters()]

    blocks.assert_equal(run(blocks.Stack(call=call)), run(blocks.Stack(call=plain)))


def test_backward_may_run_under_another_autocast():
    def run(call):
        torch.manual_seed(1)
        model = blocks.Stack(call=call)
        out = model(torch.randn(4, 8, requires_grad=True)).pow(2).mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out.backward()
        return [p.grad for p in model.parameters()]

    # Backward of torch's operators does not look at autocast, so both are in float32.
    blocks.assert_equal(run(by(checkpoint)), run(None))


@pytest.mark.parametrize(("stop", "runs_of_tail"), [(True, 1), (False, 2)])
def test_early_stop(stop, runs_of_tail):
    tails = []

    def block(x):
        y = x.exp()
        tails.append(1)
        return y + 1

    def tail(x):
        y = x.sin() * 2
        z = y + 1  # saves nothing
        tails.append(1)
        return z

    x = torch.ones(2, requires_grad=True)
    checkpoint(tail, x, use_reentrant=False, early_stop=stop).sum().backward()
    assert len(tails) == runs_of_tail
    with set_checkpoint_early_stop(stop):
        out = checkpoint(tail, x, use_reentrant=False, early_stop=not stop)
    out.sum().backward()
    assert len(tails) == 2 * runs_of_tail


def test_early_stop_is_the_default_for_small_blocks_too():
    runs = []

    def tail(x):
        y = x.sin() * 2
        runs.append(1)
        return y

    x = torch.ones(2, requires_grad=True)
    for settings, count in (({}, 1), ({"early_stop": None}, 2), ({"early_stop": False}, 2)):
        runs.clear()
        checkpoint(tail, x, use_reentrant=False, **settings).sum().backward()
        assert len(runs) == count, settings


def test_a_method_is_decorated():
    class Model:
        scale = 3.0

        @checkpoint(use_reentrant=False)
        def forward(self, x):
            """Scales."""
            return x.sin() * self.scale

    x = torch.ones(2, requires_grad=True)
    Model().forward(x).sum().backward()
    assert torch.allclose(x.grad, 3 * x.detach().cos())
    assert Model.forward.__doc__ == "Scales."


def test_early_stop_passes_except_exception_and_inner_checkpoints():
    def block(x):
        try:
            y = checkpoint(torch.exp, x, use_reentrant=False)
            z = y.sin()
        except Exception as error:
            raise AssertionError("seen by the block") from error
        return z + 1

    x = torch.full((2,), 0.5, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    expected = torch.full((2,), 0.5, requires_grad=True)
    (expected.exp().sin() + 1).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_backward_within_a_block():
    def block(x):
        y = x.sin().exp()
        (inner,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * inner.detach()

    results = []
    for call in (block, lambda y: checkpoint(block, y, use_reentrant=False, early_stop=False)):
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        call(x).sum().backward()
        results.append([x.grad])
    blocks.assert_equal(*results)


def test_the_device_context_of_the_forward_pass_holds_in_the_replay():
    def block(x):
        return x * torch.ones(2) * x.exp()

    with torch.device("cpu"):
        x = torch.ones(2, requires_grad=True)
        out = checkpoint(block, x, use_reentrant=False)
    with torch.device("meta"):
        out.sum().backward()
    assert x.grad.device.type == "cpu"


def test_hooks_of_parameters_fire_once():
    fired = []
    block = blocks.Block()
    block.up.weight.register_hook(lambda g: fired.append("tensor"))
    block.up.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    checkpoint(block, torch.ones(2, 8), use_reentrant=False).sum().backward()
    assert fired == ["tensor", "accumulated"]


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
def test_sequential(segments):
    def run(function):
        torch.manual_seed(0)
        layers = nn.Sequential(*(blocks.Block() for _ in range(4)))
        return blocks.step(_Wrapped(layers, function))

    ours = run(lambda layers, x: checkpoint_sequential(layers, segments, x, use_reentrant=False))
    blocks.assert_equal(ours, run(lambda layers, x: layers(x)))


class _Wrapped(nn.Module):
    def __init__(self, layers, call):
        super().__init__()
        self.layers, self.call = layers, call

    def forward(self, x):
        return self.call(self.layers, x)


def test_contexts_of_torch_run_around_both_runs():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    products = [torch.ops.aten.addmm.default]

    def contexts():
        return create_selective_checkpoint_contexts(products)

    blocks.assert_equal(blocks.step(blocks.Stack(call=by(checkpoint, context_fn=contexts))), PLAIN)


def test_saved_tensors_are_freed():
    import gc
    import weakref

    kept = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            kept.append(weakref.ref(y))
            ctx.save_for_backward(y)
            return y.clone()

        @staticmethod
        def backward(ctx, gradient):
            (y,) = ctx.saved_tensors
            return gradient * y

    x = torch.ones(2, requires_grad=True)
    out = checkpoint(Keep.apply, x, use_reentrant=False)
    assert kept[0]() is None
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    del out
    gc.collect()
    assert all(k() is None for k in kept)
