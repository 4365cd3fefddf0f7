"""Hooks that step in backward, beside torch's FSDP2 on Gloo."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


def whole(model):
    """By name, in memory of their own."""
    return models.whole_parameters(model)


def assert_equal(found, wanted, tolerance=1e-6):
    """Other vector units may round products of the same numbers once more or less."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step_in_backward(model, make_optimizer):
    """As torchtune's optimizer_in_bwd; how often each parameter was stepped."""
    optimizers = {p: make_optimizer([p]) for p in model.parameters()}
    counts = dict.fromkeys(optimizers, 0)

    def step(parameter):
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        counts[parameter] += 1
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    return counts


def adamw(parameters):
    """With an eps that keeps rounding errors of gradients near zero from becoming steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def our_adamw(parameters):
    from libddp.optim import AdamW

    return AdamW(parameters, lr=0.01, eps=1e-3)


def wide():
    """Units that are averaged each by itself, and small ones."""
    torch.manual_seed(5)
    return models.TinyGpt(layers=4, width=96)


def train(model, make_optimizer=adamw, steps=4, forward=None):
    counts = step_in_backward(model, make_optimizer)
    for step in range(steps):
        tokens = models.tokens(step)
        (forward(model, tokens) if forward else model(tokens)[1]).backward()
        assert all(p.grad is None for p in model.parameters())
    assert set(counts.values()) == {steps}
    return whole(model)


def check_an_optimizer_per_parameter_equals_torchs_fsdp2():
    for build in (models.build, wide):
        wanted = train(models.theirs(build()))
        for wrap in (models.shard, models.wrap):
            assert_equal(train(wrap(build())), wanted)
            assert_equal(train(wrap(build()), our_adamw), wanted)


def check_it_equals_a_step_after_backward():
    model = models.wrap(wide())
    models.train(model, 4, adamw)
    found = models.wrap(wide())
    train(found)
    assert_equal(whole(found), whole(model), 0)


def check_optimizers_that_torch_applies_in_backward():
    from torch.distributed.optim import _apply_optimizer_in_backward

    reference = models.wrap(wide())
    models.train(reference, 4, adamw)
    wanted = whole(reference)
    for is_before in (True, False):
        for wrap in (models.shard, models.wrap):
            model = wide()
            options = {"lr": 0.01, "eps": 1e-3}
            if is_before:
                _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), options)
            model = wrap(model)
            if not is_before:
                _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), options)
            for step in range(4):
                model(models.tokens(step))[1].backward()
            assert_equal(whole(model), wanted, 0)


def check_gradients_are_freed_in_backward():
    model = models.shard(wide())
    step_in_backward(model, adamw)
    model(models.tokens(0))[1].backward()
    for block in model.blocks:
        assert not block._libddp_wrapped_module.unit.has_gradient_memory()


def check_hooks_see_the_average_of_the_piece():
    model, reference = models.shard(), models.build()
    reference(models.tokens(0))[1].backward()
    for parameter in reference.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    seen = {}
    named = models.plain_names(model.named_parameters())
    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.update({name: p.grad.clone()})
        )
    model(models.tokens(0))[1].backward()
    pieces = {name: p.grad for name, p in named.items()}
    assert set(seen) == set(pieces)
    whole_gradients = models.whole_gradients(model)
    for name, parameter in named.items():
        assert torch.equal(local(seen[name]), local(parameter.grad))
        torch.testing.assert_close(whole_gradients[name], reference.get_parameter(name).grad)


def check_hooks_wait_for_the_pass_that_averages():
    def run(model):
        counts = step_in_backward(model, adamw)
        model.set_requires_gradient_sync(False)
        model(models.tokens(0))[1].backward()
        assert set(counts.values()) == {0}
        model.set_requires_gradient_sync(True)
        model(models.tokens(1))[1].backward()
        assert set(counts.values()) == {1}
        return whole(model)

    assert_equal(run(models.shard()), run(models.theirs()))


def check_recomputation_and_a_module_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(models.Block(12) for _ in range(2))

        def forward(self, x, how):
            for block in (*self.blocks, self.blocks[0]):
                x = block(x) if how is None else checkpoint(block, x, use_reentrant=how)
            return x.square().mean()

    def inputs(step):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return torch.randn(2, 4, 12, generator=generator)

    def run(wrap, how):
        model = wrap(models.build(Twice))
        step_in_backward(model, adamw)
        for step in range(3):
            model(inputs(step), how).backward()
        return whole(model)

    wanted = run(models.theirs, None)
    for how in (None, False):
        for wrap in (models.shard, models.wrap):
            assert_equal(run(wrap, how), wanted)


def check_hooks_with_frozen_parameters():
    def build():
        model = wide()
        for block in model.blocks:
            block.attention.requires_grad_(False)
            block.up.bias.requires_grad_(False)
        return model

    def run(model):
        for parameter in model.parameters():
            if parameter.requires_grad:
                optimizer = adamw([parameter])

                def step(p, optimizer=optimizer):
                    assert p.grad.shape == p.shape
                    optimizer.step()
                    p.grad = None

                parameter.register_post_accumulate_grad_hook(step)
        for step in range(3):
            model(models.tokens(step))[1].backward()
        return whole(model)

    wanted = run(models.theirs(build()))
    for wrap in (models.shard, models.wrap):
        assert_equal(run(wrap(build())), wanted)


def check_hooks_come_and_go():
    model = models.wrap()
    parameter = model.blocks[0].up.weight
    calls = []
    handle = parameter.register_post_accumulate_grad_hook(lambda p: calls.append("first"))
    model(models.tokens(0))[1].backward()
    second = parameter.register_post_accumulate_grad_hook(lambda p: calls.append("second"))
    handle.remove()
    model(models.tokens(1))[1].backward()
    second.remove()
    model(models.tokens(2))[1].backward()
    assert calls == ["first", "second"]


def check_a_hook_that_is_registered_inside_the_pass():
    model = models.wrap()
    parameter = model.blocks[0].up.weight
    shapes = []

    def register(gradient):
        if not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(lambda p: shapes.append(p.grad.shape))
        return gradient

    loss = model(models.tokens(0))[1]
    loss.register_hook(register)
    loss.backward()
    assert shapes == [parameter.shape]


def check_a_hook_that_raises():
    model = models.wrap(wide())
    handle = model.blocks[1].up.weight.register_post_accumulate_grad_hook(explode)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        model(models.tokens(0))[1].backward()
    handle.remove()
    again = models.wrap(wide())
    models.train(again, 2, adamw)
    models.train(model, 2, adamw)
    assert_equal(whole(model), whole(again), 0)


def explode(parameter):
    raise ZeroDivisionError("in a hook")


results, test_late_hooks = checks.suite(globals(), 2)
