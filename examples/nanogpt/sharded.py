"""A network whose weights, gradients and moments are sharded over the ranks (FSDP).

    model = wrap(network, optimizer)              # a unit per block; the optimizer's moments follow
    scaler = same_scaler(scaler, device)
    state = moments(model, optimizer)             # whole, as torch.optim has them; a collective

A checkpoint of sharded ranks is therefore like any other: train.py and train_fsdp.py go on from
each other's, on any number of ranks.
"""

import torch
from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
from libddp.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from libddp.distributed.fsdp.wrap import ModuleWrapPolicy
from model import GPT, Block


def wrap(network: GPT, optimizer: torch.optim.Optimizer, **options) -> FSDP:
    state = optimizer.state_dict()
    model = FSDP(network, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    if state["state"]:  # each rank keeps its part
        named = _renamed(state, _names(model, optimizer))
        FSDP.optim_state_dict_to_load(model, optimizer, named, load_directly=True)
    return model


def same_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """With the same scale; all ranks skip a step if one of them has had an overflow."""
    if not scaler.is_enabled():
        return scaler
    sharded = ShardedGradScaler(device.type)
    sharded.load_state_dict(scaler.state_dict())
    return sharded


def moments(model: FSDP, optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's whole state, by number of the parameter; a collective."""
    state = FSDP.optim_state_dict(model, optimizer)
    return _renamed(state, {name: number for number, name in _names(model, optimizer).items()})


def _names(model: FSDP, optimizer) -> dict[int, str]:
    """Number of a parameter in the optimizer -> its name in the network, without FSDP's own."""
    named = model.named_parameters()
    names = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in named}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: names[id(p)] for number, p in enumerate(parameters)}


def _renamed(state: dict, names: dict) -> dict:
    """An optimizer's state with other keys for its parameters: numbers, names."""
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": groups,
    }
