"""checkpoint_wrapper and apply_activation_checkpointing: torch's faces, libddp's checkpoint."""

import blocks
import pytest
import torch
from libddp.distributed.algorithms._checkpoint import checkpoint_wrapper as ours
from libddp.utils.checkpoint import CheckpointError
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as theirs


def wrapped(module, impl, **settings):
    model = blocks.Stack()
    module.apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda m: module.checkpoint_wrapper(m, impl, **settings),
        check_fn=lambda m: isinstance(m, blocks.Block),
    )
    return model


@pytest.mark.parametrize("impl", list(ours.CheckpointImpl))
def test_gradients_are_those_of_the_bare_model(impl):
    model = wrapped(ours, impl)
    assert all(isinstance(block, ours.CheckpointWrapper) for block in model.blocks)
    blocks.assert_equal(blocks.step(model), blocks.step(blocks.Stack()))
    blocks.assert_equal(blocks.step(wrapped(theirs, impl)), blocks.step(blocks.Stack()))


def test_keyword_arguments_with_both_variants():
    for impl in ours.CheckpointImpl:
        torch.manual_seed(0)
        block = blocks.Block(dropout=0.0)
        x = torch.ones(2, 8, requires_grad=True)
        ours.checkpoint_wrapper(block, impl)(x, scale=2.0).sum().backward()
        expected = torch.ones(2, 8, requires_grad=True)
        block(expected, scale=2.0).sum().backward()
        assert torch.equal(x.grad, expected.grad)


def test_names_are_those_of_the_bare_model():
    bare, model = blocks.Stack(), wrapped(ours, ours.CheckpointImpl.NO_REENTRANT)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert [n for n, _ in model.blocks[0].named_parameters()] == [
        n for n, _ in bare.blocks[0].named_parameters()
    ]
    for parameter in bare.parameters():
        parameter.data.add_(1)
    model.load_state_dict(bare.state_dict())
    assert torch.equal(model.blocks[1].norm.weight, bare.blocks[1].norm.weight)
    assert model.blocks[0].up is model.blocks[0]._checkpoint_wrapped_module.up


def test_settings_and_an_own_function_reach_the_block():
    calls = []

    def own(function, *args, **settings):
        calls.append(settings)
        return function(*args)

    block = ours.checkpoint_wrapper(blocks.Block(), checkpoint_fn=own, depth=2)
    block(torch.ones(2, 8))
    assert calls == [{"depth": 2}]
    block = ours.checkpoint_wrapper(blocks.Block(), determinism_check="all")
    with pytest.raises(ValueError, match="determinism_check"):
        block(torch.ones(2, 8))


def test_errors_name_the_place():
    model = wrapped(ours, ours.CheckpointImpl.NO_REENTRANT)
    x = torch.ones(2, 8, requires_grad=True)
    out = model(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(CheckpointError, match=r"checkpoint of Block blocks\.0: input 0"):
        out.sum().backward()


def test_offloading_is_torchs():
    assert ours.offload_wrapper is theirs.offload_wrapper
    assert issubclass(ours.CheckpointWrapper, theirs.CheckpointWrapper)
