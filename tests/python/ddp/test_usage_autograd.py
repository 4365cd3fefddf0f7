"""What a user does to the graph: recomputation, hooks, functions, threads, higher order."""

import contextlib
import inspect
import threading

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import Mlp
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from usage import assert_agree, compare, data, gradients, ours, parameters, train


def state_error(match):
    from libddp.errors import StateError

    return pytest.raises(StateError, match=match)


def block():
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh())


class Recomputed(nn.Module):
    """Blocks with dropout, each of them recomputed; `skipped` is left out."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.reentrant = nn.Linear(16, 16), reentrant
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, value, skipped=None):
        value = self.first(value)
        for index, layer in enumerate(self.blocks):
            if index != skipped:
                value = checkpoint(layer, value, use_reentrant=self.reentrant)
        return value


class RecomputedInSegments(Recomputed):
    def forward(self, value):
        value = self.first(value)
        return checkpoint_sequential(self.blocks, 2, value, use_reentrant=self.reentrant)


def recomputed(wrap, net, reentrant, options):
    model = wrap(net(reentrant), bucket_cap_mb=0.002, **options)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return parameters(model)


def check_checkpointing_with_dropout():
    plain = {}
    for net in (Recomputed, RecomputedInSegments):
        for reentrant in (True, False):
            for options in ({}, {"static_graph": True}):
                trained = compare(recomputed, net, reentrant, options)
                assert_agree(trained)
                plain.setdefault("first", trained)
                # Recomputation changes no number: the masks are drawn again from the same state.
                assert all(map(torch.equal, trained, plain["first"]))


def skipping(wrap, reentrant):
    model = wrap(Recomputed(reentrant), bucket_cap_mb=0.002, find_unused_parameters=True)
    collected = []
    for step in range(4):
        model.zero_grad()
        model(data(4), (step + dist.get_rank()) % 4).pow(2).mean().backward()
        collected.append(gradients(model))
    return collected


def check_checkpointing_with_unused_parameters():
    compare(skipping, False)
    # torch refuses the other mode here; ours gives the same numbers as without reentrance.
    seeded = []
    for reentrant in (False, True):
        torch.manual_seed(17 + dist.get_rank())
        seeded.append(skipping(ours, reentrant))
    for one, other in zip(*seeded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def grad_of_parameters(wrap, create_graph):
    """torch.autograd.grad past the wrapper: each rank gets its own gradients."""
    model = wrap(Mlp(2))
    collected = []
    for _ in range(3):
        value = model(data(4)).pow(2).sum()
        taken = torch.autograd.grad(value, list(model.parameters()), create_graph=create_graph)
        assert all(p.grad is None for p in model.parameters())
        collected.append([g.detach().clone() for g in taken])
    return collected


def check_autograd_grad():
    for create_graph in (False, True):
        taken = compare(grad_of_parameters, create_graph)
        with pytest.raises(AssertionError, match="the ranks differ"):
            assert_agree(taken[0])


def gradients_of_gradients(wrap):
    """A penalty on the gradients of all parameters; the last backward alone is averaged."""
    model = wrap(Mlp(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        value = model(data(4)).pow(2).mean()
        taken = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        (value + sum(g.pow(2).sum() for g in taken)).backward()
        optimizer.step()
    return parameters(model)


def check_gradients_of_gradients():
    assert_agree(compare(gradients_of_gradients))


class TwoLosses(Mlp):
    def forward(self, value):
        hidden = super().forward(value)
        return hidden.sum(), hidden.pow(2).sum()


def check_two_losses_of_one_forward():
    model = ours(TwoLosses(2))
    first, second = model(data(2))
    first.backward(retain_graph=True)
    kept = gradients(model)
    assert_agree(kept)
    second.backward()
    assert_agree(gradients(model))
    assert not any(map(torch.equal, kept, gradients(model)))
    compare(summed_losses)


def summed_losses(wrap):
    model = wrap(TwoLosses(2))
    for _ in range(2):
        sum(model(data(2))).backward()
    return gradients(model)


def in_a_thread(wrap):
    model = wrap(Mlp(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(data(4)).pow(2).mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer.step()
    return parameters(model)


def check_backward_in_a_thread():
    assert_agree(compare(in_a_thread))


class Scaled(nn.Module):
    """By buffers that a graph saves, contiguous and not."""

    def __init__(self):
        super().__init__()
        self.inner = Mlp(2)
        self.register_buffer("plain", torch.full((16,), 2.0 + dist.get_rank()))
        self.register_buffer("turned", torch.randn(3, 16).t())

    def forward(self, value):
        return (self.inner(value) * self.plain) @ self.turned


def two_forwards(wrap):
    model = wrap(Scaled())
    for _ in range(2):
        (model(data(4)).sum() + model(data(4)).sum()).backward()
    return gradients(model), list(model.buffers())


def check_buffers_come_while_a_graph_waits():
    # torch 2.11's own raises: the buffers that it broadcasts count as changed.
    does_torch = "preserve_version" in inspect.getsource(nn.parallel.DistributedDataParallel)
    assert_agree((compare(two_forwards) if does_torch else two_forwards(ours))[0])


class DropsWeight(torch.autograd.Function):
    """x @ w, whose backward has nothing to say about w."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(weight)
        return value @ weight

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight.t(), None


class WithoutGradient(nn.Module):
    def __init__(self, silent_on):
        super().__init__()
        self.inner, self.silent = Mlp(2), nn.Parameter(torch.randn(16, 16))
        self._drop = DropsWeight.apply if dist.get_rank() in silent_on else torch.matmul

    def forward(self, value):
        return self._drop(self.inner(value), self.silent)


def without_gradient(wrap, options, silent_on):
    model = wrap(WithoutGradient(silent_on), **options)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    collected = []
    for _ in range(3):
        optimizer.zero_grad()
        model(data(4)).pow(2).mean().backward()
        collected.append(gradients(model.module))
        optimizer.step()
    return collected, parameters(model)


def check_a_function_that_returns_none():
    """Where parameters may stay unused, its parameter keeps None and its weight does not decay."""
    every = {"find_unused_parameters": True}
    for options in ({}, every, {"static_graph": True}, every | {"gradient_as_bucket_view": True}):
        for silent_on in ((0, 1), (1,)):
            compare(without_gradient, options, silent_on)


def accumulated_without_gradient(wrap):
    model = wrap(WithoutGradient((0, 1)))
    collected = []
    for context in (model.no_sync(), contextlib.nullcontext()):
        with context:
            model(data(4)).pow(2).mean().backward()
        collected.append(gradients(model.module))
    return collected


def check_a_function_that_returns_none_amid_no_sync():
    """Then not even where all are to be used, before the averages come."""
    amid, behind = compare(accumulated_without_gradient)
    assert amid[0] is None
    assert not behind[0].any()


def watched(wrap, set_to_none):
    """What hooks of the user see: the gradients of their own rank."""
    model = wrap(Mlp(2), bucket_cap_mb=0.002)
    seen = []
    for parameter in model.parameters():
        parameter.register_hook(lambda g: seen.append(g.clone()))
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model.module.layers[0].weight.register_hook(lambda g: g * 2)
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        model(data(4)).pow(2).mean().backward()
    return seen, gradients(model)


def check_hooks_see_local_gradients():
    for set_to_none in (True, False):
        seen, averaged = compare(watched, set_to_none)
        assert len(seen) == 3 * 2 * 4
        assert_agree(averaged)
        with pytest.raises(AssertionError, match="the ranks differ"):
            assert_agree(seen)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def with_symmetry(layer):
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def parametrized(wrap, change):
    model = wrap(nn.Sequential(change(nn.Linear(16, 16)), nn.Tanh(), change(nn.Linear(16, 16))))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model.state_dict()


def check_parametrized_weights():
    changes = [
        with_symmetry,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        nn.utils.spectral_norm,
    ]
    for change in changes:
        compare(parametrized, change)


class LowRank(nn.Module):
    """A frozen layer and a low-rank change of it that trains."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, value):
        return self.base(value) + self.up(self.down(value))


def low_rank(wrap):
    net = Mlp(3)
    net.layers = nn.ModuleList(LowRank(layer) for layer in net.layers)
    model = wrap(net)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train(model, optimizer)
    assert all(layer.base.weight.grad is None for layer in net.layers)
    return model.state_dict()


def check_low_rank_adapters():
    state = compare(low_rank)
    assert_agree(state.values())
    assert state["module.layers.0.up.weight"].any()


results, test_on_both_ranks = checks.suite(globals(), 2)
