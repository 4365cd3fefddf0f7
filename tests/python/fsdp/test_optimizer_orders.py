"""Optimizer states where ranks order parameters differently, or no optimizer is given."""

import checks
import ddp_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
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


class Around(nn.Module):
    """A wrapped layer, and a parameter that no unit has."""

    def __init__(self, wrap, has_scale):
        super().__init__()
        torch.manual_seed(7)
        self.inner = wrap(nn.Linear(4, 4))
        if has_scale:
            self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.inner(x).sum()


def torchs(module):
    return torch.distributed.fsdp.FullyShardedDataParallel(
        module,
        process_group=ddp_models.gloo(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def check_a_parameter_that_no_unit_has():
    found = []
    for wrap in (models.libddp_fsdp().FullyShardedDataParallel, torchs):
        saved = Around(wrap, has_scale=False)
        package = type(saved.inner)
        optimizer = torch.optim.AdamW(saved.parameters(), lr=0.01)
        saved(torch.ones(4)).backward()
        optimizer.step()
        state = package.optim_state_dict(saved, optimizer)
        model = Around(wrap, has_scale=True)
        fresh = torch.optim.AdamW(model.parameters())
        loaded = package.optim_state_dict_to_load(model, fresh, state)
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            fresh.load_state_dict(loaded)
        names = [name.split(".")[-1] for name, _ in model.named_parameters()]
        (group,) = loaded["param_groups"]
        found.append((sorted(loaded["state"]), group["params"], names))
        number = names.index("scale")
        moments = {key: torch.ones(4) for key in ("exp_avg", "exp_avg_sq")}
        loaded["state"][number] = {"step": torch.tensor(3.0), **moments}
        group["params"] = sorted([*group["params"], number])
        fresh.load_state_dict(loaded)
        assert fresh.state[model.scale]["step"] == 3
        assert fresh.param_groups[0]["lr"] == 0.01
    (_, _, names), (_, _, torchs_names) = found
    assert names == torchs_names
    assert [params for _, params, _ in found] == [[1, 2]] * 2, found


def check_a_parameter_of_a_unit_that_the_state_lacks():
    model = models.wrap()
    package = type(model)
    state = package.optim_state_dict(model, trained(model, model.parameters()))
    name = state["param_groups"][0]["params"].pop()
    del state["state"][name]
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=f"has no parameter '{name}'"):
        package.optim_state_dict_to_load(model, fresh, state)


def check_ranks_with_other_parameters():
    model = models.wrap()
    parameters = list(model.parameters())
    optimizer = trained(model, parameters[: -1 if dist.get_rank() else None])
    with pytest.raises(ValueError, match="some ranks are missing optimizer states"):
        type(model).optim_state_dict(model, optimizer)
    dist.barrier()


results, test_on_every_rank = checks.suite(globals(), 2)
