"""Several backward passes through one forward, graphs of gradients, hooks that raise."""

import os

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import Mlp
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from usage import assert_agree, compare, data, gradients, ours, parameters, seed

RANK = int(os.environ.get("RANK", 0))


def two_losses(model, separate):
    """Gradients of two losses of one forward, in a pass each or in one."""
    collected = []
    for _ in range(3):
        model.zero_grad()
        output = model(data(4))
        losses = [output.sum() / 4, output.pow(2).mean()]
        if separate:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        else:
            sum(losses).backward()
        collected += gradients(model)
    return collected


def check_two_passes_through_one_forward():
    """torch averages in the first pass only: the ranks' gradients differ then."""
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}):
        seed()
        separate = two_losses(ours(Mlp(3), bucket_cap_mb=0.001, **options), True)
        seed()
        # Two averages instead of one: other roundings.
        torch.testing.assert_close(separate, two_losses(ours(Mlp(3)), False))
        assert_agree(separate)


def check_a_pass_for_each_output():
    """The second pass through one forward, after zero_grad."""
    model = ours(Mlp(2))
    output = model(data(4))
    output.sum().backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    (2 * output).sum().backward()
    torch.testing.assert_close(gradients(model), [2 * g for g in first])
    assert_agree(gradients(model))


def with_graph(wrap, options):
    """Each step's gradients have a graph of their own; none is cleared in between."""
    model = wrap(torch.nn.Linear(1, 1, bias=False), **options)
    for _ in range(3):
        model(data(1, 1)).pow(2).sum().backward(create_graph=True)
        assert all(p.grad.requires_grad for p in model.parameters())
    return gradients(model)


class WithTemperature(torch.nn.Module):
    """Returns one of its parameters as it is, as open_clip's models do."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.net(x), self.temperature


def passes_beside_the_forward(wrap):
    model, found = wrap(WithTemperature()), []
    for _ in range(3):
        model.zero_grad()
        output, temperature = model(data(4))
        (output * temperature).pow(2).sum().backward()
        found += gradients(model)
        # No passes through the forward any more: gradients of this rank alone.
        (temperature * (RANK + 1)).backward()
        (model.module.temperature * 2).backward()
        found += gradients(model)
    return found


def check_an_output_that_is_a_parameter():
    compare(passes_beside_the_forward)


def check_create_graph():
    for options in ({}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}):
        seed()
        collected = [g.detach() for g in with_graph(ours, options)]
        assert_agree(collected)
        seed()
        model = ours(torch.nn.Linear(1, 1, bias=False))
        for _ in range(3):
            model(data(1, 1)).pow(2).sum().backward()
        torch.testing.assert_close(collected, gradients(model), rtol=0, atol=0)


def check_plain_passes_after_create_graph():
    model = ours(Mlp(2))
    inputs = data(2)
    model(inputs).sum().backward()
    plain = gradients(model)
    for clears in (True, False):
        model.zero_grad(set_to_none=clears)
        model(inputs).sum().backward(create_graph=True)
        with torch.no_grad():
            torch.testing.assert_close([p.grad for p in model.parameters()], plain)
        model.zero_grad()
        model(inputs).sum().backward()
        torch.testing.assert_close(gradients(model), plain, rtol=0, atol=0)
        assert not any(p.grad.requires_grad for p in model.parameters())


def check_create_graph_in_a_local_pass():
    model = ours(Mlp(1))
    with model.no_sync():
        model(data(2) * (RANK + 1)).sum().backward(create_graph=True)
    assert all(p.grad.requires_grad for p in model.parameters())
    model(data(2)).sum().backward()
    assert_agree(gradients(model))


def kept(wrap, options):
    """Gradients of each step, kept until the end."""
    model = wrap(Mlp(2), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collected = []
    for _ in range(3):
        optimizer.zero_grad()
        model(data(4)).sum().backward()
        collected += [p.grad for p in model.parameters()]
        optimizer.step()
    return [g.clone() for g in collected]


def check_kept_gradients():
    """Without views, as in torch; `no_sync` and unused parameters go the same way."""
    first = compare(kept, {"gradient_as_bucket_view": False})
    assert not torch.equal(first[0], first[4])
    compare(kept, {"gradient_as_bucket_view": False, "find_unused_parameters": True})
    model = ours(Mlp(2), gradient_as_bucket_view=False)
    assert model.gradient_as_bucket_view is False


def accumulated(wrap, options):
    model = wrap(Mlp(2), gradient_as_bucket_view=False, **options)
    for _ in range(2):
        with model.no_sync():
            model(data(4)).sum().backward()
        model(data(4)).sum().backward()
    return gradients(model) + parameters(model)


def moved_to_shared_memory(wrap, move, set_to_none):
    model = wrap(Mlp(2), gradient_as_bucket_view=True)
    collected = []
    for step in range(4):
        model.zero_grad(set_to_none=set_to_none)
        model(data(4)).pow(2).mean().backward()
        collected += gradients(model)
        if step == 1:
            move(model)
    return collected


def check_gradients_in_shared_memory():
    """share_memory() gives a gradient other memory than its bucket's."""
    for set_to_none in (True, False):
        for move in (
            nn.Module.share_memory,
            lambda m: m.module.layers[1].weight.grad.share_memory_(),
        ):
            assert_agree(compare(moved_to_shared_memory, move, set_to_none))


def check_accumulation_without_views():
    for options in ({}, {"find_unused_parameters": True}):
        compare(accumulated, options)


def with_options(view, kind):
    seed()
    net = Mlp(3)
    options = {
        "static graph": lambda: {"static_graph": True},
        "low precision": lambda: {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
        "late": lambda: {
            "delay_all_reduce_named_params": [("layers.0.weight", net.layers[0].weight)],
            "param_to_hook_all_reduce": net.layers[0].bias,
        },
        "by hand": dict,
        "uneven": dict,
    }[kind]()
    model = ours(net, gradient_as_bucket_view=view, bucket_cap_mb=0.001, **options)
    model.require_manual_backward_finalization = kind == "by hand"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(enable=kind == "uneven"):
        for turn in range(3 + (RANK if kind == "uneven" else 0)):
            if kind == "low precision" and turn == 1:
                with model.no_sync():
                    model(data(4)).float().sum().backward()
            model(data(4)).float().pow(2).sum().backward()
            if kind == "by hand":
                model.finalize_backward()
            optimizer.step()
            if turn == 0:
                optimizer.zero_grad()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    return parameters(model)


def check_views_or_not_beside_other_options():
    for kind in ("static graph", "low precision", "late", "by hand", "uneven"):
        trained = with_options(False, kind)
        assert_agree(trained)
        torch.testing.assert_close(
            trained, with_options(True, kind), msg=kind, rtol=1e-2, atol=1e-3
        )


def check_a_sharded_optimizer_without_views():
    from libddp.errors import StateError

    from libddp.optim import AdamW

    model = ours(Mlp(2), gradient_as_bucket_view=False)
    with pytest.raises(StateError, match="gradient_as_bucket_view=False or shard_gradients"):
        AdamW(model.parameters(), shard_over=model, shard_gradients=True)
    optimizer = AdamW(model.parameters(), shard_over=model)
    for _ in range(3):
        optimizer.zero_grad()
        model(data(2)).sum().backward()
        optimizer.step()
    assert_agree(parameters(model))


def assert_the_default_group_works():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def explode(*_):
    raise KeyError("of a hook")


def check_a_communication_hook_that_raises_on_all_ranks():
    """Caught, it has cost this model's pass and nothing else, as in torch."""
    for answer, kind in ((explode, KeyError), (lambda state, bucket: 1, TypeError)):
        model = ours(Mlp(2))
        model.register_comm_hook(None, lambda state, bucket, answer=answer: answer(state, bucket))
        with pytest.raises(kind):
            model(data(2)).sum().backward()
        assert_the_default_group_works()
        again = ours(model.module)
        again(data(2)).sum().backward()
        assert_agree(gradients(again))


def check_a_hook_of_a_parameter_that_raises_on_all_ranks():
    model = ours(Mlp(2))
    handle = model.module.layers[0].weight.register_hook(explode)
    with pytest.raises(KeyError):
        model(data(2)).sum().backward()
    handle.remove()
    assert_the_default_group_works()
    model.zero_grad()
    model(data(2)).sum().backward()
    assert_agree(gradients(model))


results, test_passes = checks.suite(globals(), 2)
