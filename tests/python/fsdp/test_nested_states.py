"""State dicts of plain modules around wrapped ones, names, ignored parameters, inference mode."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType


class Around(nn.Module):
    """A plain module with wrapped ones in it, one of them within another."""

    def __init__(self, wrap, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.second = wrap(nn.Sequential(wrap(nn.Linear(6, 5)), nn.BatchNorm1d(5)))
        self.third = wrap(nn.Linear(5, 3))

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def wrap(module, **arguments):
    return models.wrap(module, auto_wrap_policy=None, **arguments)


def plain(seed=3):
    return Around(lambda module: module, seed)


def same(left, right):
    assert list(left) == list(right)
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def check_loads_its_own_state():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = Around(lambda module, s=strategy: wrap(module, sharding_strategy=s), seed=4)
        wanted = plain().state_dict()
        result = model.load_state_dict(wanted)
        assert not result.missing_keys
        assert not result.unexpected_keys
        same(model.state_dict(), wanted)
        x = torch.ones(2, 4)
        model.eval()
        torch.testing.assert_close(model(x), plain().eval()(x), rtol=0, atol=0)


def check_loads_pieces():
    source, target = Around(wrap), Around(wrap, seed=4)
    kind = StateDictType.SHARDED_STATE_DICT
    package = models.libddp_fsdp().FullyShardedDataParallel
    with package.state_dict_type(source, kind), package.state_dict_type(target, kind):
        target.load_state_dict(source.state_dict())
    same(target.state_dict(), plain().state_dict())
    with package.state_dict_type(source, StateDictType.LOCAL_STATE_DICT):
        state = source.state_dict()
        source.load_state_dict(state)
    same(source.state_dict(), plain().state_dict())


def check_names_of_what_is_missing():
    for model in (Around(wrap), wrap(plain())):
        state = plain().state_dict()
        del state["second.0.weight"]
        state["second.0.wait"] = torch.ones(2)
        state["third.bias"] = torch.ones(3)
        result = model.load_state_dict(state, strict=False)
        assert result.missing_keys == ["second.0.weight"]
        assert result.unexpected_keys == ["second.0.wait"]
        assert torch.equal(model.state_dict()["third.bias"], torch.ones(3))
        with pytest.raises(RuntimeError, match=r'"second\.0\.weight"') as caught:
            model.load_state_dict(state)
        assert "_fsdp_wrapped_module" not in str(caught.value)
        state = plain().state_dict()
        state["third.bias"] = torch.ones(7)
        with pytest.raises(RuntimeError, match=r"size mismatch for third\.bias") as caught:
            model.load_state_dict(state)
        assert "_fsdp_wrapped_module" not in str(caught.value)


def check_state_on_the_first_rank_alone():
    model = Around(wrap)
    package = models.libddp_fsdp().FullyShardedDataParallel
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with package.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    own = plain().state_dict()
    if dist.get_rank() != 0:
        own = {name: value for name, value in own.items() if name.startswith("first.")}
    same(state, own)


def check_ignored_parameters_are_not_copied():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        module = plain()
        model = wrap(module, ignored_modules=[module.first], sharding_strategy=strategy)
        state = model.state_dict()
        assert state["first.weight"].data_ptr() == module.first.weight.data_ptr()
        assert state["second.1.running_mean"].data_ptr() == module.second[1].running_mean.data_ptr()
        before = state["third.weight"].clone()
        with torch.no_grad():
            module.third.weight.add_(1)
        assert torch.equal(state["third.weight"], before)
        package = models.libddp_fsdp().FullyShardedDataParallel
        config = FullStateDictConfig(rank0_only=True)
        with package.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            names = list(model.state_dict())
        first = [name for name in names if name.startswith("first.")]
        assert first == ["first.weight", "first.bias"]
        is_alone = strategy is ShardingStrategy.FULL_SHARD and dist.get_rank() != 0
        assert (names == first) == is_alone


def check_states_in_inference_mode():
    model = models.wrap()
    optimizer = models.adamw(model.parameters())
    models.train(model, 1, lambda _: optimizer)
    with torch.inference_mode():
        state = model.state_dict()
        with type(model).summon_full_params(model):
            whole = {name: value.clone() for name, value in model.named_parameters()}
        optimizers = type(model).optim_state_dict(model, optimizer)
        model.load_state_dict(state)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    models.train(model, 2, lambda _: optimizer)
    other = models.wrap()
    again = models.adamw(other.parameters())
    models.train(other, 1, lambda _: again)
    models.train(other, 2, lambda _: again)
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert whole
    assert optimizers["state"]
    loaded = models.wrap(models.build(seed=2))
    loaded.load_state_dict(state)
    same(dict(loaded.state_dict()), {name: value.clone() for name, value in state.items()})


results, test_on_every_rank = checks.suite(globals(), 2)
