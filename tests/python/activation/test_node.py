"""Blocks as one node: use_reentrant=True, and checkpoint_module."""

import weakref

import blocks
import pytest
import torch
from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from libddp.utils.checkpoint import checkpoint, checkpoint_module, checkpoint_sequential
from torch import nn

PLAIN = blocks.step(blocks.Stack())


def reentrant(block, *args, **settings):
    return checkpoint(block, *args, use_reentrant=True, **settings)


@pytest.mark.parametrize(
    "call",
    [
        reentrant,
        checkpoint_module,
        lambda block, x: reentrant(lambda y: reentrant(block, y), x),
        lambda block, x: reentrant(lambda y: checkpoint(block, y, use_reentrant=False), x),
        lambda block, x: checkpoint(lambda y: reentrant(block, y), x, use_reentrant=False),
        lambda block, x: checkpoint(
            lambda y: checkpoint_module(block, y), x, use_reentrant=False
        ),
        lambda block, x: checkpoint_wrapper(block, checkpoint_fn=checkpoint_module)(x),
    ],
    ids=["reentrant", "module", "nested", "mixed", "mixed in turn", "module within", "wrapper"],
)  # fmt: skip
def test_gradients_are_those_without_checkpointing(call):
    blocks.assert_equal(blocks.step(blocks.Stack(call=call)), PLAIN)


def test_other_values_and_inputs_that_need_no_gradient():
    def block(x, factor, mask, text):
        return x * factor * mask, text, mask

    x = torch.ones(3, requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0])
    out, text, same = reentrant(lambda *a: block(*a, "text"), x, 2.0 * torch.ones(3), mask)
    assert text == "text"
    assert torch.equal(same, mask)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * mask)


def test_autocast():
    def run(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return blocks.step(blocks.Stack(call=call))

    plain = run(None)
    blocks.assert_equal(run(reentrant), plain)
    blocks.assert_equal(run(checkpoint_module), plain)


def test_a_cast_made_without_grad_serves_nobody_else():
    """A weight used inside and outside the block, under autocast, gets both gradients."""
    weight = nn.Parameter(torch.ones(8, 8))
    x = torch.ones(2, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = reentrant(lambda y: y @ weight, x)
        (inside.float().sum() + (x.detach() @ weight).float().sum()).backward()
    assert torch.equal(weight.grad, torch.full((8, 8), 4.0))


def test_what_the_reentrant_variant_cannot_do():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\) or passing an `inputs`"):
        torch.autograd.grad(reentrant(torch.exp, x).sum(), x)
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        reentrant(lambda y: y.detach(), x).sum().backward()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        out = reentrant(nn.Linear(3, 3), torch.ones(1, 3))
    assert not out.requires_grad


def test_checkpoint_module_flows_in_the_outer_graph():
    fired = []
    block = blocks.Block(dropout=0.0)
    block.up.weight.register_hook(lambda g: fired.append("tensor"))
    block.up.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    checkpoint_module(block, torch.ones(2, 8)).sum().backward()
    assert fired == ["tensor", "accumulated"]
    out = checkpoint_module(block, torch.ones(2, 8)).sum()
    (gradient,) = torch.autograd.grad(out, block.up.weight)
    assert torch.equal(gradient, block.up.weight.grad)


def test_a_gradient_that_would_be_lost():
    outside = nn.Parameter(torch.ones(8))

    class Sharing(blocks.Block):
        def forward(self, x):
            return super().forward(x) * outside

    with pytest.raises(RuntimeError, match=r"checkpoint of .*Sharing: the block uses a leaf of sh"):
        checkpoint_module(Sharing(), torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("call", [reentrant, checkpoint_module])
def test_mistakes(call):
    class Flaky(blocks.Block):
        broken = False

        def forward(self, x):
            if self.broken:
                raise KeyError("broken")
            return super().forward(x)

    block = Flaky()
    x = torch.ones(2, 8, requires_grad=True) * 1
    out = call(block, x).sum()
    block.broken = True
    with pytest.raises(KeyError, match="broken"):
        out.backward(retain_graph=True)
    with pytest.raises(KeyError, match="broken"):
        call(block, x)
    block.broken = False
    out.backward(retain_graph=True)
    assert block.up.weight.grad is not None
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="Flaky: input 0 has been modified by an inplace"):
        out.backward()


def test_backward_twice():
    x = torch.ones(3, requires_grad=True)
    out = reentrant(torch.exp, x).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward()


def test_sequential():
    torch.manual_seed(0)
    layers = nn.Sequential(*(blocks.Block() for _ in range(4)))
    x = torch.ones(2, 8, requires_grad=True)
    torch.manual_seed(3)
    layers(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.manual_seed(3)
    checkpoint_sequential(layers, 2, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, expected)


class Shaped(nn.Module):
    """Uses its inputs and its weight as `form` says."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x, y):
        return self.form(x, y, self.weight)


FORMS = {
    "input returned": lambda x, y, w: (x, y * w),
    "weight returned": lambda x, y, w: (w, x * y),
    "one output twice": lambda x, y, w: [x * w] * 2,
    "one made of the other": lambda x, y, w: (lambda a: (a.sin(), a))(x * w),
    "used often": lambda x, y, w: (x * x + x.exp() * w, y * w + x),
    "an input not used": lambda x, y, w: (x * w, x),
    "the weight not used": lambda x, y, w: (x * y, y.exp()),
    "no gradient needed": lambda x, y, w: (x * w, y.detach()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("form_of_call", ["reentrant", "module", "module, own pass"])
def test_graphs_of_any_form(form, form_of_call):
    def gradients(call):
        blocks_ = [Shaped(lambda *a: tuple(FORMS[form](*a))) for _ in range(2)]
        blocks_.append(blocks_[0])
        leaf = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
        x, y = leaf * 1, leaf.sin()
        for block in blocks_:
            x, y = call(block, x, y)
        (x + leaf).sum().backward(retain_graph=form_of_call == "module, own pass")
        return [leaf.grad, *(block.weight.grad for block in blocks_)]

    plain = gradients(lambda block, x, y: block(x, y))
    ours = gradients(reentrant if form_of_call == "reentrant" else checkpoint_module)
    for expected, found in zip(plain, ours, strict=True):
        if expected is None or found is None:
            assert expected is None or not expected.any()
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", [reentrant, checkpoint_module])
def test_a_block_runs_in_the_pass_under_way_and_is_let_go(call):
    passes, alive = [], []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = nn.Module()
            alive.append(weakref.ref(ctx.kept))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            passes.append(torch._C._current_graph_task_id())
            return gradient * 2

    class Block(nn.Module):
        def forward(self, x):
            return Noting.apply(x).exp()

    x = torch.ones(3, requires_grad=True)
    middle = call(Block(), x * 1)
    middle.register_hook(lambda g: passes.append(torch._C._current_graph_task_id()))
    out = call(Block(), middle)
    node = out.grad_fn
    before = node.next_functions
    out.sum().backward()
    assert len(passes) == 3
    assert len(set(passes)) == 1
    assert [kept() for kept in alive] == [None] * 4
    assert node.next_functions == before


def test_a_reentrant_block_that_uses_a_tensor_made_outside():
    results = []
    for call in (lambda block, x: block(x), reentrant):
        leaf = torch.tensor([0.5, 1.0], requires_grad=True)
        outside = leaf.exp()
        call(lambda x, a=outside: x * a + a, leaf * 1).sum().backward()
        results.append([leaf.grad])
    blocks.assert_equal(*results)


def test_hooks_on_the_node_see_gradients_of_its_inputs():
    x = torch.full((3,), 2.0, requires_grad=True)
    out = reentrant(lambda y: y * y, x)
    seen = []
    out.grad_fn.register_hook(lambda inputs, outputs: seen.append(inputs))
    out.sum().backward()
    assert torch.equal(seen[0][0], 2 * x.detach())
