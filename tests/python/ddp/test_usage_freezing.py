"""What changes after wrapping: parameters frozen for a while or for good, other dtypes."""

import os

import checks
import pytest
import torch
from ddp_models import Mlp, drop_in_ddp
from states import assert_same
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from usage import assert_agree, compare, data, gradients, ours, parameters, seed

RANK = int(os.environ.get("RANK", 0))


def expect(kind, match):
    from libddp import errors

    return pytest.raises(getattr(errors, kind), match=match)


def freeze(module, frozen=True):
    for parameter in module.parameters():
        parameter.requires_grad = not frozen


def adversaries(wrap, options):
    """Two wrapped models; each is frozen while the other one learns through it."""
    maker, judge = wrap(Mlp(2), **options), wrap(Mlp(3), **options)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (maker, judge)]
    for _ in range(3):
        freeze(judge)
        optimizers[0].zero_grad()
        made = maker(data(4))
        judge(made).sum().backward()
        optimizers[0].step()
        assert all(p.grad is None for p in judge.parameters())
        freeze(judge, False)
        optimizers[1].zero_grad()
        judge(data(4)).pow(2).mean().backward()
        judge(made.detach()).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return [*parameters(maker), *parameters(judge)]


def check_adversaries():
    for options in ({}, {"find_unused_parameters": True}):
        assert_agree(compare(adversaries, options))


def one_model_with_two_optimizers(wrap, options):
    """As Lightning's toggle_optimizer: a part of one model is frozen in each step."""
    model = wrap(Mlp(4), find_unused_parameters=True, bucket_cap_mb=0.001, **options)
    halves = [model.module.layers[:2], model.module.layers[2:]]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in halves]
    for turn in range(6):
        own = turn % 2
        freeze(halves[1 - own])
        optimizers[own].zero_grad()
        model(data(4)).pow(2).sum().backward()
        optimizers[own].step()
        freeze(halves[1 - own], False)
    return parameters(model)


def check_one_model_with_two_optimizers():
    for options in ({}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": False}):
        assert_agree(compare(one_model_with_two_optimizers, options))


def check_a_frozen_part_counts_as_unused():
    model = ours(Mlp(3))
    freeze(model.module.layers[0])
    with expect("StateError", r"2 of 6.*'layers.0.weight' \(all ranks\).*find_unused_parameters"):
        model(data(2)).sum().backward()
    freeze(model.module.layers[0], False)
    model.zero_grad()
    model(data(2)).sum().backward()
    assert_agree(gradients(model))


def check_frozen_on_one_rank_only():
    """The others' gradients count: the ranks stay alike."""
    model = ours(Mlp(3), find_unused_parameters=True)
    freeze(model.module.layers[1], RANK == 1)
    model(data(2)).sum().backward()
    assert_agree(gradients(model))
    named = ours(Mlp(3))
    freeze(named.module.layers[1], RANK == 1)
    with expect("StateError", r"2 of 6.*'layers.1.weight' \(rank 1\)"):
        named(data(2)).sum().backward()


def check_everything_frozen_exchanges_nothing():
    model = ours(Mlp(2))
    freeze(model)
    inputs = data(2).requires_grad_()
    if RANK == 0:  # the other rank does not come
        model(inputs).sum().backward()
        assert inputs.grad is not None
    assert gradients(model) == [None] * 4
    freeze(model, False)
    model(data(2)).sum().backward()
    assert_agree(gradients(model))


def check_frozen_with_mixed_precision():
    """The parameters show full precision again after the backward pass that goes through them."""
    model = ours(Mlp(2), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    dtypes = set()
    for frozen in (False, True, False):
        freeze(model, frozen)
        model(data(2).requires_grad_()).float().sum().backward()
        dtypes |= {p.dtype for p in model.parameters()}
        model(data(2))  # leads to no backward pass where all is frozen
        if frozen:
            dtypes |= {p.dtype for p in model.parameters()}
        else:
            model(data(2)).float().sum().backward()
            assert_agree(gradients(model))
        model.zero_grad()
    assert dtypes == {torch.float32}


def check_frozen_under_join():
    model = ours(Mlp(2))
    with model.join():
        for turn in range(2 + RANK):
            freeze(model, turn == 1)
            model(data(2).requires_grad_()).sum().backward()
    freeze(model, False)
    assert_agree(parameters(model))


def check_unfrozen_after_wrapping_is_refused_by_name():
    """torch would leave its gradients out: the ranks' models would drift apart."""
    model = ours(Mlp(2, frozen=1))
    freeze(model.module.layers[0], False)
    with expect("ArgumentError", r"'layers.0.weight' had requires_grad=false .*Hint: .*frozen and"):
        model(data(2))


def check_what_a_model_tells_of_itself_while_frozen():
    model = drop_in_ddp()(Mlp(2))
    freeze(model.module.layers[0])
    told = model._get_ddp_logging_data()
    assert told["num_parameter_tensors"] == 4
    assert model.explain().num_parameters == 4


def trained_in(dtype, wrap, options):
    """Wrapped in float32, then converted and trained."""
    model = wrap(Mlp(3), **options)
    model(data(2)).sum().backward()
    model.zero_grad()
    model.to(dtype)
    return steps_in(dtype, model)


def steps_in(dtype, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data(4).to(dtype)).pow(2).mean().backward()
        optimizer.step()
    return parameters(model)


def wrapped_in(dtype, wrap, options):
    """The same with a model that is wrapped afterwards: what the one before must give."""
    net = Mlp(3)
    data(2)
    return steps_in(dtype, wrap(net.to(dtype), **options))


def check_another_dtype_after_wrapping():
    """torch's hooks are gone then, and the ranks' models drift apart without a word."""
    for options in ({}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.001}):
        for dtype in (torch.float64, torch.bfloat16):
            seed()
            converted = trained_in(dtype, ours, options)
            seed()
            assert_same(converted, wrapped_in(dtype, ours, options))
            assert_agree(converted)


def check_there_and_back():
    """An evaluation in another dtype between two steps."""
    model = ours(Mlp(3), skip_all_reduce_unused_params=True, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(data(2)).sum().backward()
        assert_agree(gradients(model))
        model.double()
        model(data(2).double())  # gradients are recorded, no backward follows
        model.float()


def check_there_and_back_with_sparse_and_delayed_gradients():
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2), nn.Linear(2, 2))
    late = [("1.weight", net[1].weight), ("1.bias", net[1].bias)]
    model = ours(net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net[1].weight)
    for _ in range(2):
        model.half()
        model.float()
        model.zero_grad()
        model(torch.randint(5, (3,))).sum().backward()
        assert_agree([p.grad.to_dense() for p in model.parameters()])


def check_a_gradient_of_the_former_dtype():
    model = ours(Mlp(2), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    model.double()
    with expect("ArgumentError", "'layers.0.weight' had dtype Float .* has dtype Double now"):
        model(data(2).double())


results, test_freezing = checks.suite(globals(), 2)
