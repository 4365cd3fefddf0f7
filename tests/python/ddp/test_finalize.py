"""require_manual_backward_finalization: backward sends, finalize_backward() waits and installs."""

import copy

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import Heads, Mlp, drop_in_ddp, libddp_ddp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def wrapped(kind=None, **options):
    torch.manual_seed(6)
    model = (kind or libddp_ddp())(Mlp(), bucket_cap_mb=0.002, **options)
    model.require_manual_backward_finalization = True
    return model


def data(seed=0):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, 16, generator=generator)


def averages(model, x):
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    plain(x).pow(2).mean().backward()
    for p in plain.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    return [p.grad for p in plain.parameters()]


def assert_averaged(model, expected):
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def check_averages_stand_there_after_finalizing():
    model = wrapped(drop_in_ddp())
    assert model.require_manual_backward_finalization
    assert not model.should_finalize_after_backward
    for step in range(4):  # the buckets are rebuilt on the way
        model.zero_grad()
        expected = averages(model, data(step))
        model(data(step)).pow(2).mean().backward()
        with pytest.raises(RuntimeError, match="finalize_backward"):
            model._check_reducer_finalized()
        model.finalize_backward()
        model._check_reducer_finalized()
        assert_averaged(model, expected)


def check_in_a_hook_of_the_last_gradient():
    """The input of the first layer gets its gradient after every parameter."""
    model = wrapped()
    for step in range(3):
        model.zero_grad()
        expected = averages(model, data(step))
        x = data(step).requires_grad_()
        done = []
        # `torch.tanh` before the model: its node runs when all parameters have fired.
        before = torch.clone(x)
        before.register_hook(lambda grad, done=done: done.append(model.finalize_backward()))
        model(before).pow(2).mean().backward()
        assert done == [None]
        assert_averaged(model, expected)


def check_with_a_hook_and_unused_parameters():
    model = wrapped()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model(data()).pow(2).mean().backward()
    model.finalize_backward()
    heads = libddp_ddp()(Heads(), find_unused_parameters=True)
    heads.require_manual_backward_finalization = True
    assert heads.should_finalize_after_backward
    heads(torch.ones(2, 4), dist.get_rank()).sum().backward()
    heads.finalize_backward()
    assert heads.module.heads[1].weight.grad is not None
    assert heads.module.heads[2].weight.grad is None


def check_wrong_moments():
    model = wrapped()
    with pytest.raises(RuntimeError, match="no backward pass waits for it"):
        model.finalize_backward()
    loss = model(data()).pow(2).mean()
    with pytest.raises(RuntimeError, match="no backward pass waits for it"):
        model.finalize_backward()
    loss.backward()
    with pytest.raises(RuntimeError, match="only between backward passes"):
        model.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match=r"call finalize_backward\(\) after backward"):
        model(data())
    model.finalize_backward()
    with pytest.raises(RuntimeError, match="no backward pass waits for it"):
        model.finalize_backward()
    model.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="backward passes end by themselves"):
        model.finalize_backward()
    model(data()).pow(2).mean().backward()


def check_copies_keep_the_mode():
    copied = copy.deepcopy(wrapped())
    copied(data()).pow(2).mean().backward()
    copied.finalize_backward()


results, test_finalize = checks.suite(globals(), 2)
