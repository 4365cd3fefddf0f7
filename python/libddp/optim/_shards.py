"""The work of an optimizer, shared by the ranks of a DistributedDataParallel model (ZeRO-1).

Each rank gets the averages of the elements that it owns, has the optimizer's state of those, and
updates those; see libddp/ddp/sharded_parameters.h. Parameters stay whole for the user.

    shards = Shards(model, optimizer)
    if shards.begin():                                   # a collective
        ...                                              # update shards.own(parameters)
        shards.publish()                                 # a collective
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from libddp._load import load
from libddp.distributed._groups import native
from libddp.errors import ArgumentError, StateError
from libddp.optim import _guards

_C = load()
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Shards:
    """What this rank owns of a model, from the first synchronising backward pass on."""

    def __init__(self, model, optimizer) -> None:
        _check_model(model)
        replica = model._replica
        named = dict(model.module.named_parameters())
        self._names = replica.trained_names()
        self._parameters = [named[name] for name in self._names]
        self._indices = {p: index for index, p in enumerate(self._parameters)}
        self.check(optimizer.param_groups)
        replica.shard()
        model._is_sharded = True
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._replica = replica
        self.group = native(model.process_group)
        self._sharded: Any = None
        self._own: list[torch.Tensor] = []
        self._positions: dict[torch.Tensor, int] = {}
        self._ordered: dict[tuple, tuple[list, list, list]] = {}
        self._numbers: dict[str, Any] = {}
        _guards.watch(self)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of the model that are trained."""
        return self._parameters

    def check(self, groups: list[dict]) -> None:
        """ArgumentError unless `groups` have exactly the model's trained parameters."""
        given = [p for group in groups for p in group["params"] if p.requires_grad]
        for number, parameter in enumerate(given):
            if parameter not in self._indices:
                raise ArgumentError(
                    f"libddp: AdamW(shard_over=model): parameter {number} of the optimizer, "
                    f"{list(parameter.shape)}, is not one that the model trains. Hint: make "
                    "another optimizer for what is not in the model."
                )
        known = set(given)
        missing = [n for n, p in zip(self._names, self._parameters, strict=True) if p not in known]
        if missing:
            raise ArgumentError(
                f"libddp: AdamW(shard_over=model): the optimizer lacks {missing[0]!r}"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''} of the model's "
                "trained parameters, whose gradients no other optimizer could use. Hint: pass all "
                "of them, in groups where they differ, or freeze what is not trained."
            )

    # A step.

    def begin(self) -> bool:
        """Waits for all ranks; False where no backward pass has synchronised, so nothing is due."""
        model = self._model()
        if model is None or model._replica is not self._replica:
            raise StateError(
                "libddp: AdamW(shard_over=model): the model's process group or hooks were replaced "
                "since the optimizer was made. Hint: make a new optimizer and load this one's "
                "state_dict() into it."
            )
        self._replica.check_averaged()
        if not self.make_ready():
            return False
        self._sharded.begin_update()
        return True

    def publish(self) -> None:
        """All ranks see what all of them have updated."""
        self._sharded.publish()

    def make_ready(self) -> bool:
        """Whether it is known what this rank owns; the first time, a collective."""
        if self._sharded is None and self._replica.has_blocks():
            self._sharded = self._replica.sharded_parameters()
            self._own = self._sharded.own()
            order = self._sharded.in_order()
            self._positions = {self._parameters[i]: n for n, i in enumerate(order)}
            optimizer = self._optimizer()
            amsgrad = any(group["amsgrad"] for group in optimizer.param_groups)
            for key in _MOMENTS[: 3 if amsgrad else 2]:
                self._numbers[key] = self._sharded.make_numbers()
            self.cut(optimizer.state)
        return self._sharded is not None

    def own(self, parameters: list[torch.Tensor]) -> tuple[list, list, list]:
        """`parameters` in the order of memory, and of each what is owned, with its gradient."""
        key = tuple(map(id, parameters))
        if key not in self._ordered:  # one entry per group, as long as the same ones are used
            if len(self._ordered) > 100:
                self._ordered.clear()
            parameters = sorted(parameters, key=self._positions.__getitem__)
            indices = [self._indices[p] for p in parameters]
            self._ordered[key] = (parameters, indices, [self._own[i] for i in indices])
        parameters, indices, own = self._ordered[key]
        return parameters, own, self._sharded.own_gradients(indices)

    def gradient_parts(self, ids: set[int]) -> dict[int, torch.Tensor]:
        """Of the gradients with these ids, those of the model -> what this rank owns of them."""
        indices = [i for i, p in enumerate(self._parameters) if id(p.grad) in ids]
        if not indices or not self.make_ready():
            return {}
        owned = self._sharded.own_gradients(indices)
        return {id(self._parameters[i].grad): part for i, part in zip(indices, owned, strict=True)}

    def agree(self, found_inf: torch.Tensor) -> None:
        """Infinite on all ranks if on one."""
        if self.group.size() > 1:
            self.group.all_reduce(found_inf, op=dist.ReduceOp.MAX)

    # The state.

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Zeros for what is owned."""
        index = self._indices[parameter]
        moments = {key: numbers.own(index).zero_() for key, numbers in self._numbers.items()}
        return {"step": torch.zeros(()), **moments}

    def cut(self, state: dict) -> None:
        """Whole states that were loaded become this rank's part of them."""
        if self._sharded is None:
            return
        for parameter, entries in state.items():
            index = self._indices[parameter]
            mine = {"step": torch.as_tensor(entries["step"], dtype=torch.float32).clone()}
            for key, numbers in self._numbers.items():
                whole = entries.get(key)
                if whole is None or whole.shape != parameter.shape:
                    raise ArgumentError(
                        f"libddp: AdamW.load_state_dict: {key!r} of {self._names[index]!r} "
                        f"{'is missing' if whole is None else f'has {list(whole.shape)}'}, and the "
                        f"parameter has {list(parameter.shape)}. Hint: load the state of an AdamW "
                        "over the same model."
                    )
                numbers.load(index, whole)
                mine[key] = numbers.own(index)
            state[parameter] = mine

    def whole(self, state_dict: dict[str, Any], groups: list[dict]) -> dict[str, Any]:
        """`state_dict` with whole tensors; a collective between hosts."""
        if self._sharded is None:
            return state_dict
        parameters = [p for group in groups for p in group["params"]]
        state = {
            number: {
                key: self._numbers[key].whole(self._indices[parameters[number]])
                if key in self._numbers
                else value.clone()
                for key, value in entries.items()
            }
            for number, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}


def _check_model(model) -> None:
    from libddp.nn.parallel import DistributedDataParallel
    from libddp.nn.parallel._reducer_handle import Unhooked

    if not isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            f"libddp: AdamW(shard_over=...) takes a libddp.nn.parallel.DistributedDataParallel "
            f"model, and got {type(model).__name__}. Hint: pass the wrapped model; sharded units "
            "(FSDP) have their state sharded without it."
        )
    if isinstance(model._replica, Unhooked):
        raise StateError(
            "libddp: AdamW(shard_over=model): the model's autograd hooks have been removed. "
            "Hint: wrap the inner module again."
        )
