"""What a checkpointed block must not do: the error names the block, and the state stays usable."""

import contextlib

import blocks
import pytest
import torch
from libddp.utils.checkpoint import CheckpointError, checkpoint, checkpoint_sequential
from torch import nn


class Changing(nn.Module):
    """Gives other shapes, or fewer saved tensors, the second time."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.runs = how, 0

    def forward(self, x):
        self.runs += 1
        again = self.runs > 1
        if self.how == "shape" and again:
            x = x[:1]
        if self.how == "dtype" and again:
            x = x.double()
        if self.how == "fewer" and again:
            return x.exp()
        y = x.exp() * x.sin()
        if self.how == "more" and again:
            y = y.exp().exp()
        return y


@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_other_shapes_or_dtypes(how):
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(Changing(how), x, use_reentrant=False)
    with pytest.raises(CheckpointError) as raised:
        out.sum().backward()
    text = str(raised.value)
    assert "libddp checkpoint of Changing: Recomputed values" in text
    assert "have different metadata" in text
    assert "tensor at position 0" in text
    assert "shape [3], dtype Float" in text


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("fewer", "A different number of tensors was saved"),
        ("more", r"torch\.utils\.checkpoint: trying to save more tensors during recomputation"),
    ],
)
def test_another_number_of_tensors(how, text):
    block = Changing(how)
    block._libddp_block_name = "h.3"
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False, early_stop=False)
    with pytest.raises(CheckpointError, match=rf"checkpoint of Changing h\.3: {text}"):
        out.sum().backward()
    if how == "more":  # what comes after the last tensor that is needed never runs
        again = Changing(how)
        checkpoint(again, x, use_reentrant=False).sum().backward()


def test_debug_lists_the_operators():
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(Changing("shape"), x, use_reentrant=False, debug=True)
    with pytest.raises(CheckpointError, match=r"aten\.exp"):
        out.sum().backward()


def test_the_check_can_be_turned_off():
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(Changing("dtype"), x, use_reentrant=False, determinism_check="none")
    out.sum().backward()
    assert x.grad is not None
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        checkpoint(torch.exp, x, use_reentrant=False, determinism_check="all")


@pytest.mark.parametrize("where", ["between", "within"])
def test_an_input_changed_in_place(where):
    def block(x):
        y = x.sin() * x
        if where == "within":
            with torch.no_grad():
                x.add_(1)
        return y

    x = torch.ones(3, requires_grad=True) * 1
    out = checkpoint(block, x, use_reentrant=False)
    if where == "between":
        with torch.no_grad():
            x.mul_(2)
    with pytest.raises(CheckpointError) as raised:
        out.sum().backward()
    assert "<locals>.block: input 0 has been modified by an inplace operation" in str(raised.value)


def test_an_input_given_by_name_and_changed_in_place():
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3)
    out = checkpoint(lambda x, weight: x * weight, x, use_reentrant=False, weight=weight)
    weight.add_(1)
    with pytest.raises(CheckpointError, match="input weight has been modified"):
        out.sum().backward()


def test_a_block_that_changes_what_it_saved():
    def block(x):
        y = x.exp()
        y.add_(1)
        return y.sin()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        checkpoint(block, x, use_reentrant=False).sum().backward()


def test_an_error_in_the_forward_pass_leaves_all_as_it_was():
    def block(x):
        x.exp()
        raise KeyError("no such thing")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(KeyError, match="no such thing"):
        checkpoint(block, x, use_reentrant=False)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    x.exp().sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_an_error_in_the_replay_can_be_mended():
    class Flaky(nn.Module):
        broken = False

        def forward(self, x):
            y = x.exp()
            if self.broken:
                raise KeyError("broken")
            return y.sin()

    flaky = Flaky()
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(flaky, x, use_reentrant=False).sum()
    flaky.broken = True
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="broken"):
        out.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    flaky.broken = False
    out.backward()
    expected = torch.ones(3, requires_grad=True)
    expected.exp().sin().sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_saved_tensors_read_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            ctx.saved_tensors  # noqa: B018
            ctx.saved_tensors  # noqa: B018
            return gradient

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(CheckpointError, match="already unpacked once"):
        checkpoint(Twice.apply, x, use_reentrant=False).sum().backward()


def test_arguments_that_do_not_go_together():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        checkpoint(blocks.Block(3), x, use_reentrant=True, scale=2.0)
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        checkpoint(torch.exp, x, use_reentrant=True, debug=True)
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        checkpoint(torch.exp, x, use_reentrant=True, respect_saved_tensors_hooks=True)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        checkpoint(use_reentrant=False, scale=2.0)
    with pytest.raises(ValueError, match="incompatible with non-default context_fn"):
        checkpoint(torch.exp, x, use_reentrant=False, debug=True, context_fn=lambda: (None, None))
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        checkpoint(torch.exp, x)
    with pytest.raises(ValueError, match="2 functions do not make 3 segments"):
        checkpoint_sequential([torch.exp, torch.sin], 3, x, use_reentrant=False)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: depth"):
        checkpoint_sequential([torch.exp], 1, x, use_reentrant=False, depth=2)


def test_the_reentrant_form_says_what_it_cannot_in_torchs_words_and_goes_on():
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(torch.exp, x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is incompatible with \.grad"):
        torch.autograd.grad(out, (x,))
    checkpoint(torch.exp, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_the_reentrant_form_refuses_passes_that_need_its_graph():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph\) need a graph of the block"):
        checkpoint(torch.exp, x, use_reentrant=True).sum().backward(create_graph=True)
    out = checkpoint(torch.exp, x, use_reentrant=True).sum()
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(RuntimeError, match="compiled autograd cannot see what this node does"),
    ):
        torch.compile(lambda loss: loss.backward(), backend="eager")(out)


def test_a_context_that_swallows_the_blocks_error():
    def contexts():
        return contextlib.suppress(ZeroDivisionError), contextlib.nullcontext()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="suppressed an exception raised during"):
        checkpoint(lambda y: y * (1 // 0), x, use_reentrant=False, context_fn=contexts)
