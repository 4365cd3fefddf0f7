"""What passes under no_sync leave, and what scripts do with it, beside torch's FSDP on Gloo."""

import checks
import ddp_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
STRATEGIES = (*SHARDED, ShardingStrategy.NO_SHARD)


def layers():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def ours(**arguments):
    return models.libddp_fsdp().FullyShardedDataParallel(layers(), **arguments)


def torchs(**arguments):
    return torch.distributed.fsdp.FullyShardedDataParallel(
        layers(),
        process_group=ddp_models.gloo(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        **arguments,
    )


def one_pass(model, factor=1.0):
    (factor * model(torch.arange(6.0).view(2, 3) + dist.get_rank()).sum()).backward()


def unaveraged(model, factor=10.0):
    with model.no_sync():
        one_pass(model, factor)


def averages(model):
    with type(model).summon_full_params(model, with_grads=True):
        return [p.grad.clone() for p in model.parameters()]


def of_this_rank(model):
    return [p.grad.clone() for p in model.parameters()]


def scale(model, factor):
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def clears(set_to_none):
    def run(model):
        unaveraged(model)
        model.zero_grad(set_to_none=set_to_none)
        one_pass(model)

    return run


def clears_between_forward_and_backward(model):
    unaveraged(model)
    with model.no_sync():
        loss = model(torch.arange(6.0).view(2, 3) + dist.get_rank()).sum()
        model.zero_grad(set_to_none=False)
        loss.backward()
    one_pass(model)


def clears_one(model):
    unaveraged(model)
    next(model.parameters()).grad.zero_()
    one_pass(model)


def scales(model):
    unaveraged(model)
    scale(model, 3)
    one_pass(model)


def adds_up(model):
    unaveraged(model)
    unaveraged(model, 0.3)
    one_pass(model)


def averages_before(model):
    one_pass(model)
    unaveraged(model)
    one_pass(model)


def saves_between(model):
    unaveraged(model)
    model.state_dict()
    one_pass(model)


SCRIPTS = (
    clears(set_to_none=True),
    clears(set_to_none=False),
    clears_between_forward_and_backward,
    clears_one,
    scales,
    adds_up,
    averages_before,
    saves_between,
)

#: After a forward that leaves parameters whole, torch's have no gradients that could be cleared.
HIDDEN_BY_TORCH = ((ShardingStrategy.SHARD_GRAD_OP, clears_between_forward_and_backward),)


def check_averages_are_torchs():
    for strategy in STRATEGIES:
        for script in SCRIPTS:
            if (strategy, script) in HIDDEN_BY_TORCH:
                continue
            mine, theirs = ours(sharding_strategy=strategy), torchs(sharding_strategy=strategy)
            script(mine)
            script(theirs)
            for own, other in zip(averages(mine), averages(theirs), strict=True):
                torch.testing.assert_close(own, other, msg=f"{strategy} {script.__name__}")


def check_gradients_of_this_rank_are_shown():
    for strategy in STRATEGIES:
        mine, theirs = ours(sharding_strategy=strategy), torchs(sharding_strategy=strategy)
        for model in (mine, theirs):
            unaveraged(model)
        assert all(map(torch.equal, of_this_rank(mine), of_this_rank(theirs)))
        norms = [model.clip_grad_norm_(1.0) for model in (mine, theirs)]
        torch.testing.assert_close(*norms)
        for model in (mine, theirs):
            one_pass(model)
            unaveraged(model)
        for own, other in zip(of_this_rank(mine), of_this_rank(theirs), strict=True):
            torch.testing.assert_close(own, other)


def check_clearing_lets_go_of_averages_from_before_too():
    wanted, model = ours(), ours()
    one_pass(wanted)
    averages_before(model)
    unaveraged(model)
    model.zero_grad()
    one_pass(model)
    assert all(map(torch.equal, averages(model), averages(wanted)))


def check_low_precision_is_shown_as_it_is():
    for reduce_dtype in (torch.float32, None):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for strategy in STRATEGIES:
            found = []
            for make in (ours, torchs):
                model = make(sharding_strategy=strategy, mixed_precision=precision)
                unaveraged(model)
                unaveraged(model, 0.3)
                assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
                found.append(of_this_rank(model))
                one_pass(model)
                assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
                found.append(averages(model))
            assert all(map(torch.equal, found[0], found[2])), strategy
            for own, other in zip(found[1], found[3], strict=True):  # the last sum is rounded once
                torch.testing.assert_close(own, other, rtol=0.02, atol=0.1)


def check_fully_shard_adds_up_in_the_precision_of_the_average():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for shard in (models.libddp_fsdp().fully_shard, lambda m, **how: models.theirs(m, [], **how)):
        model = shard(layers(), mp_policy=policy)
        model.set_requires_gradient_sync(False)
        one_pass(model, 10.0)
        one_pass(model, 0.3)
        model.set_requires_gradient_sync(True)
        one_pass(model)
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def check_optimizers_refuse_them():
    from libddp.errors import StateError

    from libddp.optim import AdamW

    def fused(parameters):
        return torch.optim.AdamW(parameters, fused=True)

    for strategy in SHARDED:
        for make in (fused, AdamW, torch.optim.AdamW):
            model, other = ours(sharding_strategy=strategy), nn.Linear(2, 2)
            optimizer, others = make(model.parameters()), make(other.parameters())
            before = [p.detach().clone() for p in model.parameters()]
            unaveraged(model)
            with pytest.raises(StateError, match=r"from a pass under no_sync"):
                optimizer.step()
            other(torch.ones(2)).sum().backward()
            others.step()
            assert all(map(torch.equal, before, model.parameters()))
            one_pass(model)
            optimizer.step()
            assert not torch.equal(before[0], next(model.parameters()))


def check_the_averaging_pass_may_be_in_a_closure():
    """As Lightning's Trainer does it."""
    for by_name in (False, True):
        moved = []
        for model in (ours(), torchs()):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            unaveraged(model, 0.1)

            def closure(model=model):
                one_pass(model)
                return 7

            loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            assert loss == 7
            with type(model).summon_full_params(model):
                moved.append([p.detach().clone() for p in model.parameters()])
        for own, other in zip(*moved, strict=True):
            torch.testing.assert_close(own, other)


def check_a_closure_without_an_averaging_pass_is_refused():
    from libddp.errors import StateError

    model = ours()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StateError, match=r"from a pass under no_sync"):
        optimizer.step(lambda: unaveraged(model))
    assert all(map(torch.equal, before, model.parameters()))


def check_optimizers_refuse_them_where_one_rank_owns_all_rows():
    from libddp.errors import StateError

    model = models.wrap(nn.Linear(3, 1, bias=False), auto_wrap_policy=None)
    unaveraged(model)
    with pytest.raises(StateError, match=r"'weight' is that of this rank"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def check_an_optimizer_without_sharding_takes_them():
    moved = []
    for make in (ours, torchs):
        model = make(sharding_strategy=ShardingStrategy.NO_SHARD)
        unaveraged(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        moved.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *moved))


def check_whole_averages_are_refused():
    from libddp.errors import StateError

    for strategy in SHARDED:
        model = ours(sharding_strategy=strategy)
        one_pass(model)
        unaveraged(model)
        with pytest.raises(StateError, match="wait to be averaged"):
            averages(model)
        with type(model).summon_full_params(model):
            pass
        one_pass(model)
        averages(model)


def check_a_pass_that_fails_leaves_them():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("mine")

    for strategy in STRATEGIES:
        model, wanted = ours(sharding_strategy=strategy), ours(sharding_strategy=strategy)
        unaveraged(model)
        with pytest.raises(KeyError, match="mine"):
            Failing.apply(model(torch.ones(2, 3))).sum().backward()
        one_pass(model)
        unaveraged(wanted)
        one_pass(wanted)
        assert all(map(torch.equal, averages(model), averages(wanted)))


def check_fully_shard_keeps_them_to_itself():
    """As torch's: p.grad is the average or nothing, and zero_grad() does not reach them."""
    found = []
    for shard in (models.libddp_fsdp().fully_shard, models.theirs):
        model = layers()
        model = shard(model) if shard is not models.theirs else shard(model, [])
        model.set_requires_gradient_sync(False)
        one_pass(model)
        assert all(p.grad is None for p in model.parameters())
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        one_pass(model)
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *found))


results, test_on_two_ranks = checks.suite(globals(), 2)
