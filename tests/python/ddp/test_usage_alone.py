"""At world size 1 a wrapped model trains exactly as the module itself, whatever it is asked for."""

import checks
import pytest
import torch
from ddp_models import ConvNet, Heads, Mlp
from states import assert_same
from usage import data, gradients, ours

OPTIONS = [
    {},
    {"bucket_cap_mb": 0.0005},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"broadcast_buffers": False, "init_sync": False},
]


def trained(wrap, make_model, value_of):
    torch.manual_seed(3)
    model = wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        value_of(model).pow(2).mean().backward()
        optimizer.step()
    return getattr(model, "module", model).state_dict()


def assert_equals_plain(make_model, value_of, **options):
    plain = trained(lambda net: net, make_model, value_of)
    assert_same(dict(trained(lambda net: ours(net, **options), make_model, value_of)), dict(plain))


def check_every_option():
    for options in OPTIONS:
        assert_equals_plain(Mlp, lambda model: model(data(4)), **options)
        assert_equals_plain(ConvNet, lambda model: model(torch.randn(2, 3, 5, 5)), **options)


def check_unused_parameters():
    def value_of(model):
        return model(data(2, 4), int(torch.randint(3, ())))

    assert_equals_plain(Heads, value_of, find_unused_parameters=True)
    from libddp.errors import StateError

    model = ours(Heads())
    with pytest.raises(StateError, match=r"rank 0/1] .*4 of 8.* 'heads.1.weight', .*Hint"):
        model(data(2, 4), 0).sum().backward()


def check_accumulation_and_join():
    def accumulating(model):
        if not hasattr(model, "no_sync"):
            model(data(4)).sum().backward()
        else:
            with model.no_sync():
                model(data(4)).sum().backward()
        return model(data(4))

    assert_equals_plain(Mlp, accumulating)
    model = ours(Mlp())
    with model.join():
        for _ in range(3):
            model(data(4)).sum().backward()
    assert all(g.abs().sum() > 0 for g in gradients(model))


def check_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def hooked(net):
        model = ours(net, bucket_cap_mb=0.002)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        return model

    plain = trained(lambda net: net, Mlp, lambda model: model(data(4)))
    assert_same(dict(trained(hooked, Mlp, lambda model: model(data(4)))), dict(plain))


results, test_equals_the_module = checks.suite(globals(), 1)
