"""Optimizer states where ranks order parameters differently, or no optimizer is given."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)


def trained(model, parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    models.train(model, 2, lambda _: optimizer)
    return optimizer


def reversed_on_last_rank(model):
    parameters = list(model.parameters())
    return parameters[::-1] if dist.get_rank() else parameters


def same(left, right):
    assert left.keys() == right.keys()
    for name, entries in left.items():
        for key, value in entries.items():
            assert torch.equal(value, right[name][key]), (name, key)


def check_another_order_on_each_rank():
    model, other = models.wrap(), models.wrap()
    package = type(model)
    wanted = package.optim_state_dict(model, trained(model, model.parameters()))
    optimizer = trained(other, reversed_on_last_rank(other))
    found = package.optim_state_dict(other, optimizer)
    same(found["state"], wanted["state"])
    assert list(found["state"]) == list(wanted["state"])
    again = models.wrap()
    fresh = torch.optim.AdamW(reversed_on_last_rank(again)[::-1], lr=0.5)
    fresh.load_state_dict(package.optim_state_dict_to_load(again, fresh, found))
    same(package.optim_state_dict(again, fresh)["state"], wanted["state"])


def check_without_an_optimizer():
    model = models.wrap()
    package = type(model)
    optimizer = trained(model, model.parameters())
    whole = package.full_optim_state_dict(model, optimizer)
    wanted = package.optim_state_dict(model, optimizer)["state"]
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(package.scatter_full_optim_state_dict(whole, model))
    same(package.optim_state_dict(model, fresh)["state"], wanted)
    holder = [whole]
    dist.broadcast_object_list(holder, src=0)
    parameters = reversed_on_last_rank(model)
    fresh = torch.optim.AdamW(parameters)
    with pytest.warns(FutureWarning, match="optim_input"):
        state = package.shard_full_optim_state_dict(holder[0], model, parameters)
    fresh.load_state_dict(state)
    same(package.optim_state_dict(model, fresh)["state"], wanted)
    by_number = package.rekey_optim_state_dict(holder[0], OptimStateKeyType.PARAM_ID, model)
    assert list(by_number["state"]) == list(range(len(parameters)))


def check_a_state_that_the_first_rank_alone_has():
    model = models.wrap()
    package = type(model)
    optimizer = trained(model, model.parameters())
    wanted = package.optim_state_dict(model, optimizer)["state"]
    first_rank = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    )
    fresh = torch.optim.AdamW(model.parameters())
    with package.state_dict_type(model, *first_rank):
        state = package.optim_state_dict(model, optimizer)
        assert bool(state) == (dist.get_rank() == 0)
        fresh.load_state_dict(package.optim_state_dict_to_load(model, fresh, state))
    same(package.optim_state_dict(model, fresh)["state"], wanted)


def check_states_without_groups():
    model = models.wrap()
    package = type(model)
    optimizer = trained(model, model.parameters())
    bare = {"state": optimizer.state_dict()["state"]}
    state = package.optim_state_dict(model, optimizer, bare)
    assert list(state) == ["state"]
    loaded = package.optim_state_dict_to_load(model, optimizer, state)
    assert list(loaded) == ["state"]
    same(loaded["state"], bare["state"])


def check_ranks_with_other_parameters():
    model = models.wrap()
    parameters = list(model.parameters())
    optimizer = trained(model, parameters[: -1 if dist.get_rank() else None])
    with pytest.raises(ValueError, match="some ranks are missing optimizer states"):
        type(model).optim_state_dict(model, optimizer)
    dist.barrier()


results, test_on_every_rank = checks.suite(globals(), 2)
