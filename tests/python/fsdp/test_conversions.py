"""half() after wrapping, full precision in eval, copies, and what torch refuses or warns of."""

import copy
import warnings

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

LOW = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
)


def same(left, right):
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name


def trained(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = models.train(model, steps, lambda _: optimizer)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def check_other_dtypes_after_wrapping():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for convert in (lambda m: m.bfloat16(), lambda m: m.to(torch.float64)):
            wanted = trained(models.wrap(convert(models.build()), sharding_strategy=strategy))
            model = models.wrap(sharding_strategy=strategy)
            parameters = list(model.parameters())
            assert convert(model) is model
            assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            found = trained(model)
            assert found[0] == wanted[0]
            same(found[1], wanted[1])


def check_conversion_after_training():
    model = models.wrap()
    model(models.tokens(0))[1].backward()
    with type(model).summon_full_params(model, with_grads=True):
        gradients = [p.grad.clone() for p in model.parameters()]
    model.double()
    assert all(p.grad.dtype == torch.float64 for p in model.parameters() if p.grad is not None)
    with type(model).summon_full_params(model, with_grads=True):
        for parameter, grad in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad.float(), grad)
    trained(model)
    with pytest.raises(RuntimeError, match="part of a sharded model"):
        model.blocks[0].half()
    with type(model).summon_full_params(model), pytest.raises(RuntimeError, match="are whole"):
        model.half()
    before = model.state_dict()
    model.to("cpu")
    same(model.state_dict(), before)


def check_what_accelerate_makes_float32():
    """It asks each unit, the outermost first; the parameters stay the same objects."""
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    wanted = trained(models.wrap(models.build().bfloat16().float(), mixed_precision=policy))
    model = models.wrap(models.build().bfloat16(), mixed_precision=policy)
    parameters = list(model.parameters())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not any(unit._has_params for unit in model.fsdp_modules(model))
    said = [str(warning.message) for warning in told if "made float32" in str(warning.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    found = trained(model)
    assert found[0] == wanted[0]
    same(found[1], wanted[1])
    frozen = models.wrap(models.build().bfloat16().requires_grad_(False))
    assert not any(unit._has_params for unit in frozen.fsdp_modules(frozen))
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}


def check_full_precision_in_eval():
    patch = pytest.MonkeyPatch()
    patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    try:
        model = models.wrap(mixed_precision=LOW)
        other = models.wrap()
    finally:
        patch.undo()
    low = models.wrap(mixed_precision=LOW)
    tokens = models.tokens(0)
    assert model(tokens)[0].dtype == torch.bfloat16
    model.eval()
    found = model(tokens)[0]
    assert torch.equal(found, other.eval()(tokens)[0])
    found.sum().backward()
    model.zero_grad()
    model.train()
    assert trained(model)[0] == trained(low)[0]
    assert low.eval()(tokens)[0].dtype == torch.bfloat16


def check_copies_train_alike_and_apart():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = models.wrap(sharding_strategy=strategy)
        trained(model, 1)
        before = model.state_dict()
        copied = copy.deepcopy(model)
        around = copy.deepcopy(nn.Sequential(model))[0]
        wanted = trained(model)
        for made in (copied, around):
            same(made.state_dict(), before)
            found = trained(made)
            assert found[0] == wanted[0]
            same(found[1], wanted[1])
        same(model.state_dict(), wanted[1])


def check_copies_of_what_fully_shard_made_say_why_not():
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(models.shard())


def check_attributes():
    model = models.wrap(backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True)
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert model.forward_prefetch
    assert model.limit_all_gathers


def check_clipping_by_a_part_of_the_model():
    model = models.wrap()
    model(models.tokens(0))
    with pytest.raises(RuntimeError, match="should only be called on the root"):
        model.blocks[0].clip_grad_norm_(1.0)
    with pytest.warns(UserWarning, match="with no gradients -- returning the total norm"):
        norm = model.clip_grad_norm_(1.0)
    assert norm.item() == 0
    assert norm.dtype == torch.float32


def check_torchs_clipping_says_once_what_differs():
    model = models.wrap()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(models.tokens(0))[1].backward()
            model.clip_grad_norm_(0.1)
        assert not [w for w in caught if "the norm over all ranks here" in str(w.message)]
        for _ in range(2):
            model(models.tokens(0))[1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    told = [w for w in caught if "the norm over all ranks here" in str(w.message)]
    assert len(told) == (dist.get_rank() == 0)
    assert all(w.filename == __file__ for w in told)


def check_configurations_of_another_type():
    model = models.wrap()
    package = type(model)
    with pytest.raises(RuntimeError, match=r"Expected state_dict_config of type.*ShardedStateDict"):
        package.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, FullStateDictConfig())
    with pytest.raises(RuntimeError, match=r"Expected optim_state_dict_config of type.*FullOptim"):
        package.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            ShardedStateDictConfig(),
        )
    package.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    chosen = package.get_state_dict_type(model)
    assert isinstance(chosen.state_dict_config, ShardedStateDictConfig)


results, test_on_every_rank = checks.suite(globals(), 2)
