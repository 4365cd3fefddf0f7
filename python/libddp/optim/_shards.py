"""The work of an optimizer, shared by the ranks of a DistributedDataParallel model (ZeRO-1).

The face of libddp/optim/adamw_shards.h: what a rank owns and updates is decided there, the state
dicts in torch's format are made here.

    shards = Shards(model, optimizer)
    if shards.begin():                                   # a collective
        shards.update(parameters, steps, lr=3e-4, ...)
        shards.publish()                                 # a collective
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from libddp.distributed._groups import native
from libddp.errors import ArgumentError, StateError
from libddp.optim import _guards


class Shards:
    """What this rank owns of a model, from the first synchronising backward pass on."""

    def __init__(self, model, optimizer, shard_gradients: bool) -> None:
        self._shards_gradients = shard_gradients
        _check_model(model)
        self._replica = model._replica
        parameters = _parameters(optimizer.param_groups)
        self._shards = self._replica.shard_adamw(parameters, shard_gradients)
        model._is_sharded = True
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self.group = native(model.process_group)
        #: Those of the model that are trained.
        self.parameters: list[torch.Tensor] = self._shards.parameters
        self.update, self.publish = self._shards.update, self._shards.publish
        if shard_gradients:
            _guards.watch(self)

    def check(self, groups: list[dict]) -> None:
        """ArgumentError unless `groups` have exactly the model's trained parameters."""
        self._shards.check(_parameters(groups))

    def rejoined(self) -> Shards:
        """The same over the group that the model is in now; a collective."""
        model = self._model()
        if model is None:
            raise StateError(
                "libddp: AdamW.rejoin(): the model of shard_over is gone. Hint: make the optimizer "
                "anew."
            )
        return Shards(model, self._optimizer(), self._shards_gradients)

    def check_member(self) -> None:
        """StateError where the model has gone on in another group, and the optimizer has not."""
        self._shards.check_member()

    # A step.

    def begin(self) -> bool:
        """Waits for all ranks; False where no backward pass has synchronised, so nothing is due."""
        self._shards.check_member()
        model = self._model()
        if model is None or model._replica is not self._replica:
            raise StateError(
                "libddp: AdamW(shard_over=model): the model's process group or hooks were replaced "
                "since the optimizer was made. Hint: make a new optimizer and load this one's "
                "state_dict() into it."
            )
        self._shards.check_averaged()
        if not self.make_ready():
            return False
        self._shards.begin_update()
        return True

    def make_ready(self) -> bool:
        """Whether it is known what this rank owns; the first time, a collective."""
        was_ready, optimizer = self._shards.is_ready, self._optimizer()
        amsgrad = any(group["amsgrad"] for group in optimizer.param_groups)
        if not self._shards.make_ready(amsgrad):
            return False
        if not was_ready:
            self.cut(optimizer.state)
        return True

    def own_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank owns of `parameter.grad`."""
        return self._shards.own_gradient(parameter)

    # The state.

    def add_state(self, parameters: list[torch.Tensor], state: dict) -> None:
        """Zeros for what is owned."""
        for parameter in parameters:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments = self._named(self._shards.new_moments(parameter))
            state[parameter].update({"step": step, **moments})

    def cut(self, state: dict) -> None:
        """Whole states that were loaded become this rank's part of them."""
        if not self._shards.is_ready:
            return
        names = self._shards.moment_names
        for parameter, entries in state.items():
            step = torch.as_tensor(entries["step"], dtype=torch.float32, device=parameter.device)
            own = self._shards.load_moments(parameter, [entries.get(name) for name in names])
            state[parameter] = {"step": step.clone(), **self._named(own)}

    def whole(self, state_dict: dict[str, Any], groups: list[dict]) -> dict[str, Any]:
        """`state_dict` with whole tensors; a collective between hosts and on devices."""
        if not self._shards.is_ready:
            return state_dict
        parameters = [p for group in groups for p in group["params"]]
        state = {
            number: {
                "step": entries["step"].clone(),
                **self._named(self._shards.whole_moments(parameters[number])),
            }
            for number, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def _named(self, moments: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self._shards.moment_names, moments, strict=True))


def _parameters(groups: list[dict]) -> list[torch.Tensor]:
    return [p for group in groups for p in group["params"]]


def _check_model(model) -> None:
    from libddp.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            f"libddp: AdamW(shard_over=...) takes a libddp.nn.parallel.DistributedDataParallel "
            f"model, and got {type(model).__name__}. Hint: pass the wrapped model; sharded units "
            "(FSDP) have their state sharded without it."
        )
