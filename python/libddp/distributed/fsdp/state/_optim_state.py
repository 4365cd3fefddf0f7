"""Optimizer states of sharded models: whole tensors by parameter name, and back to shards."""

from __future__ import annotations

import copy
import functools
import hashlib
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from libddp.distributed.fsdp.state._shard_specs import ShardSpec, shard_specs_of, whole_of
from libddp.distributed.fsdp.state._sharded_tensors import convert, own_shard
from libddp.distributed.fsdp.wrap import _dtensors
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.errors import ArgumentError


def full_state(model: torch.nn.Module, optimizer, state_dict: dict | None) -> dict[str, Any]:
    """`{"state": {name: ...}, "param_groups": [{..., "params": [names]}]}`; a collective."""
    return _by_name(model, optimizer, state_dict, _whole, _check_alike)


def sharded_state(
    model: torch.nn.Module,
    optimizer,
    state_dict: dict | None,
    config: Any = None,
    copies: bool = False,
) -> dict[str, Any]:
    """The same with what this rank owns, in the optimizer's memory: DTensors, or what torch's
    `config` of sharded optimizer states wants.

    Args:
        copies: of FullyShardedDataParallel's parameters, as torch has them.
    """

    def sharded(entries: dict[str, Any], spec: ShardSpec | None) -> dict[str, Any]:
        apart = copies and spec is not None and not spec.sharding.use_dtensor
        return {
            key: convert(value, spec, config, apart)
            if _is_cut(value, spec) and spec.group is not None
            else _copy(value)
            if apart
            else value
            for key, value in sorted(entries.items())
        }

    return _by_name(model, optimizer, state_dict, sharded)


def _by_name(model, optimizer, state_dict, convert, check=None) -> dict[str, Any]:
    """In the order of the model: that of the optimizer may be another one on each rank."""
    state_dict = state_dict or optimizer.state_dict()
    names = _names(model, _ordered(optimizer))
    specs = {canonical(name): spec for name, spec in _named_specs(model)}
    others = _beside_parameters(model, state_dict["state"])
    found = {
        _name_of(key, names): _local(entries)
        for key, entries in state_dict["state"].items()
        if key not in others
    }
    order = names_in_order(model)
    if check is not None:
        check([name for name in order if name in found and name in specs], specs)
    state = {name: convert(found[name], specs.get(name)) for name in order if name in found}
    state.update(others)
    if "param_groups" not in state_dict:
        return {"state": state}
    groups = [
        {**group, "params": [_name_of(key, names) for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _named_specs(model: torch.nn.Module) -> list[tuple[str, ShardSpec]]:
    specs = shard_specs_of(model)
    named = torch.nn.Module.named_parameters(model)
    return [(name, specs[id(p)]) for name, p in named if id(p) in specs]


def _name_of(key: int | str, names: list[str]) -> str:
    """Optimizers that know names (torch's _NamedOptimizer) have them as keys."""
    return canonical(key) if isinstance(key, str) else names[key]


def _beside_parameters(model: torch.nn.Module, state: dict) -> dict[str, Any]:
    """Counts and settings that an optimizer keeps in its state under names of its own. torch's
    functions hand them out and back as they are.
    """
    parameters = set(names_in_order(model))

    def has_tensors(entries: Any) -> bool:
        values = entries.values() if isinstance(entries, dict) else (entries,)
        return any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values)

    return {
        key: copy.copy(entries)
        for key, entries in state.items()
        if isinstance(key, str) and canonical(key) not in parameters and not has_tensors(entries)
    }


def _check_alike(names: list[str], specs: dict[str, ShardSpec]) -> None:
    """What all ranks gather together, all ranks must have; a collective."""
    digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
    for group in dict.fromkeys(spec.group for spec in specs.values()):
        if group is None or group.size() == 1:
            continue
        ends = torch.tensor([digest, -digest], device="cpu")
        group.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise ArgumentError(
                "libddp fsdp: some ranks are missing optimizer states that others have; this one "
                f"has {len(names)}, of {', '.join(names[:3])} and so on. Hint: give the optimizers "
                "of all ranks the same parameters, in any order, and step them all."
            )


def state_to_load(
    model: torch.nn.Module, optimizer, full: dict[str, Any], with_names: bool = False
) -> dict[str, Any]:
    """What optimizer.load_state_dict takes on this rank, in the order of its own groups.

    Args:
        with_names: its keys are the names of parameters, as the optimizer has them.
    """
    if isinstance(optimizer, Order):
        optimizer = optimizer.of_those_in(model, full)
    if "state" not in full:
        raise ArgumentError(
            f"libddp fsdp: the optimizer state has no 'state' but {sorted(map(str, full))}. Hint: "
            "give each rank what optim_state_dict() returned; a rank that has none gives it {} "
            "only with FullOptimStateDictConfig(rank0_only=True)."
        )
    parameters = _ordered(optimizer)
    names = _names(model, parameters)
    specs = shard_specs_of(model)
    indices = {name: index for index, name in enumerate(names)}
    others = _beside_parameters(model, full["state"])
    unknown = [name for name in full["state"] if name not in indices and name not in others]
    if unknown:
        raise ArgumentError(
            f"libddp fsdp: the optimizer state has {unknown[0]!r}"
            f"{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}, which the optimizer "
            "has not. Hint: build model and optimizer as when the state was saved."
        )
    order = [name for name in names_in_order(model) if name in full["state"]]
    keys: dict[str, Any] = dict(indices)
    if with_names:
        keys.update({canonical(key): key for key in optimizer.state_dict()["state"]})
    state = {}
    for name in order:
        parameter = parameters[indices[name]]
        spec = specs.get(id(parameter))
        state[keys[name]] = _like(parameter, _cut(name, full["state"][name], spec), spec)
    state.update(others)
    if "param_groups" not in full:
        return {"state": state}
    foreign = {i for i, p in enumerate(parameters) if specs and id(p) not in specs}
    groups = _groups_to_load(optimizer, names, full, foreign)
    if with_names:
        groups = [{**g, "params": [keys[names[i]] for i in g["params"]]} for g in groups]
    return {"state": state, "param_groups": groups}


def names_in_order(model: torch.nn.Module) -> list[str]:
    """Canonical names of the model's parameters, in an order that all ranks have."""
    return list(dict.fromkeys(canonical(name) for name, _ in model.named_parameters()))


@dataclass
class Order:
    """In place of an optimizer where only the order of its parameters counts."""

    param_groups: list[dict[str, Any]]
    #: Of all parameters of the model, of which an optimizer may have had some only.
    is_guess: bool = False

    @staticmethod
    def of(model: torch.nn.Module, optim_input, optimizer):
        """From torch's former argument: parameters or groups of them; None = all of the model."""
        if optim_input is not None:
            warnings.warn(
                "libddp fsdp: the `optim_input` argument is deprecated, in torch too. Hint: pass "
                "optim, or leave it out.",
                FutureWarning,
                stacklevel=3,
            )
        if optimizer is not None:
            return optimizer
        entries = list(model.parameters() if optim_input is None else optim_input)
        groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
        groups = [{**group, "params": list(group["params"])} for group in groups]
        return Order(groups, is_guess=optim_input is None)

    def of_those_in(self, model: torch.nn.Module, full: dict[str, Any]) -> Order:
        """Without parameters that the optimizer of a state had not (frozen ones)."""
        saved = {name for group in full.get("param_groups", ()) for name in group["params"]}
        if not self.is_guess or not saved:
            return self
        known = {id(p): canonical(name) for name, p in model.named_parameters()}
        kept = [
            {**group, "params": [p for p in group["params"] if known[id(p)] in saved]}
            for group in self.param_groups
        ]
        return Order(kept)


def rekeyed(
    state: dict[str, Any], with_names: bool, model: torch.nn.Module, optimizer
) -> dict[str, Any]:
    """A state with parameters' names in place of their numbers, or the other way round.

    Args:
        optimizer: whose numbers they are.
    """
    kind = str if with_names else int
    if all(isinstance(key, kind) for group in state["param_groups"] for key in group["params"]):
        return state
    names = _names(model, _ordered(optimizer))
    keys = dict(enumerate(names)) if with_names else {name: i for i, name in enumerate(names)}
    others = _beside_parameters(model, state["state"])
    unknown = [key for key in state["state"] if key not in keys and key not in others]
    if unknown:
        raise ArgumentError(
            f"libddp fsdp: the optimizer state has {unknown[0]!r}, which is no parameter of "
            f"{type(model).__name__}. Hint: pass the model and the optimizer of the state."
        )
    groups = [
        {**group, "params": [keys[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    found = {keys[key]: v for key, v in state["state"].items() if key not in others}
    return {"state": {**found, **others}, "param_groups": groups}


def only_of(model: torch.nn.Module, optimizer, full: dict[str, Any]) -> dict[str, Any]:
    """What a state of several optimizers has of this one."""
    names = {*_names(model, _ordered(optimizer)), *_beside_parameters(model, full["state"])}
    state = {name: entries for name, entries in full["state"].items() if name in names}
    return {**full, "state": state}


def refuse_missing(model: torch.nn.Module, optimizer, full: dict[str, Any]) -> None:
    """torch's error, where a state lacks that of a parameter that is trained."""
    parameters = _ordered(optimizer)
    for name, parameter in zip(_names(model, parameters), parameters, strict=True):
        if parameter.requires_grad and name not in full["state"]:
            raise RuntimeError(
                f"libddp fsdp: Missing optimizer state for parameter {name!r} in checkpoint. The "
                "parameter requires gradients but has no saved optimizer state. Hint: to load "
                "anyway, use StateDictOptions(strict=False)."
            )


def groups_to_load(model: torch.nn.Module, optimizer, full: dict[str, Any]) -> list[dict]:
    """The optimizer's groups with the saved settings."""
    return _groups_to_load(optimizer, _names(model, _ordered(optimizer)), full)


def _groups_to_load(
    optimizer, names: list[str], full: dict[str, Any], foreign: Collection[int] = ()
) -> list[dict[str, Any]]:
    """The optimizer's groups, each with the settings of the saved group of its parameters.

    Args:
        foreign: parameters that no unit has; those that the state lacks are left out, as torch
            does it, so that a script may add what it knows of them.
    """
    saved = {name: group for group in full["param_groups"] for name in group["params"]}
    groups, first = [], 0
    for group in optimizer.param_groups:
        indices = list(range(first, first + len(group["params"])))
        first += len(indices)
        missing = [index for index in indices if names[index] not in saved]
        if missing and all(index in foreign for index in missing):
            _say_left_out(tuple(names[index] for index in missing))
            indices = [index for index in indices if index not in missing]
        elif missing:
            raise ArgumentError(
                f"libddp fsdp: the optimizer state has no parameter {names[missing[0]]!r}, which "
                "the optimizer has. Hint: build model and optimizer as when the state was saved."
            )
        settings = saved[names[indices[0]]] if indices else group
        groups.append({**settings, "params": indices})
    return groups


@functools.cache
def _say_left_out(names: tuple[str, ...]) -> None:
    warnings.warn(
        f"libddp fsdp: the optimizer state has nothing for {names[0]!r}"
        f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}, which no sharded unit has; "
        "what is to be loaded leaves it out. Hint: add an entry, and the number in its group, "
        "before optimizer.load_state_dict(), which wants all parameters.",
        stacklevel=5,
    )


def _ordered(optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _names(model: torch.nn.Module, parameters: list[torch.Tensor]) -> list[str]:
    known = {id(p): canonical(name) for name, p in model.named_parameters()}
    missing = [index for index, p in enumerate(parameters) if id(p) not in known]
    if missing:
        raise ArgumentError(
            f"libddp fsdp: parameter {missing[0]} of the optimizer is not one of the model. "
            "Hint: pass the model that the optimizer was made for."
        )
    return [known[id(p)] for p in parameters]


def _local(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: _dtensors.local_of(value) for key, value in entries.items()}


def _like(
    parameter: torch.Tensor, entries: dict[str, Any], spec: ShardSpec | None
) -> dict[str, Any]:
    """With DTensors for what is cut as `parameter`, if that is one."""
    if not _dtensors.is_dtensor(parameter):
        return entries
    return {
        key: _dtensors.like(parameter, value) if _is_cut(value, spec) else value
        for key, value in entries.items()
    }


def _whole(entries: dict[str, Any], spec: ShardSpec | None) -> dict[str, Any]:
    return {
        key: spec.gather(value) if _is_cut(value, spec) else _copy(value)
        for key, value in sorted(entries.items())
    }


def _cut(name: str, entries: dict[str, Any], spec: ShardSpec | None) -> dict[str, Any]:
    cut = {}
    for key, value in entries.items():
        own = None if spec is None else own_shard(value, spec)
        if own is not None:  # FSDP1's: in memory that the state dict has not, as torch's
            cut[key] = own if spec.sharding.use_dtensor else own.clone()
            continue
        value = whole_of(value)
        is_whole = spec is not None and isinstance(value, torch.Tensor) and value.dim() > 0
        if is_whole and value.shape != spec.shape:
            raise ArgumentError(
                f"libddp fsdp: optimizer state {key!r} of {name!r} has the shape "
                f"{list(value.shape)}, the parameter {list(spec.shape)}. Hint: load the state of "
                "the same model."
            )
        cut[key] = spec.cut(value) if is_whole else _copy(value)
    return cut


def _is_cut(value: Any, spec: ShardSpec | None) -> bool:
    return (
        spec is not None
        and isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.shape == spec.own_shape
    )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
