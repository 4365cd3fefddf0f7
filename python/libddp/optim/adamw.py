"""AdamW in one pass over flat memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from libddp._load import load
from libddp.errors import ArgumentError, StateError
from libddp.optim import _dtensors
from libddp.optim._shards import Shards

_C = load()


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), with neighbours in memory updated as one tensor.

    The pieces of a sharded unit, and their gradients, lie one behind the other; 144 small tensors
    become a few large ones. Results are those of torch's fused AdamW, bit for bit, and so is the
    state, which either can load from the other.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch; `lr` may be a tensor.
        shard_over: a DistributedDataParallel model whose trained parameters are those of the
            optimizer. Then each rank has the state of a part of the elements only and updates it
            (ZeRO-1); parameters and gradients stay whole. See docs/ddp.md.
        shard_gradients: with `shard_over`: each rank also gets the averages of its part only, so a
            backward pass sends half as much between hosts. `.grad` then holds averages in that
            part and this rank's own gradients elsewhere: not for scripts that compute something
            from single gradients (SAM, adaptive clipping). Norms and GradScaler are right.
        foreach, fused: without effect.
        capturable, differentiable: not supported; ArgumentError.

    Raises:
        ArgumentError: (a ValueError and a RuntimeError) `shard_over` is no such model, or one with
            mixed_precision or delayed parameters; a parameter is missing or not the model's;
            shard_gradients without shard_over.
        StateError: (a RuntimeError) the model has a communication hook, sparse gradients, or
            another sharded optimizer; at the step: gradients that have not been averaged.
        ArgumentError: at the step: a parameter that is not a
            dense floating-point tensor with memory.

    Note:
        With `shard_over`, step() is a collective, and so is state_dict() between hosts and of a
        model on a GPU (of one on CPUs of one host any rank may call it by itself). State dicts hold
        whole tensors.

    Example:
        >>> optimizer = AdamW(model.parameters(), lr=3e-4)             # doctest: +SKIP
        >>> optimizer.step()                                           # doctest: +SKIP
    """

    _shards: Shards | None = None

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        shard_over: torch.nn.Module | None = None,
        shard_gradients: bool = False,
    ) -> None:
        if capturable or differentiable:
            raise ArgumentError(
                "libddp: AdamW is neither capturable nor differentiable. "
                "Hint: use torch.optim.AdamW for that."
            )
        if shard_gradients and shard_over is None:
            raise ArgumentError(
                "libddp: AdamW: shard_gradients=True without shard_over. "
                "Hint: pass the DistributedDataParallel model whose gradients they are."
            )
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=False
        )
        self._step_supports_amp_scaling = True
        if shard_over is not None:
            self._shards = Shards(shard_over, self, shard_gradients)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; ArgumentError where the model of `shard_over` does not train it."""
        super().add_param_group(param_group)
        if self._shards is not None:
            self._shards.check(self.param_groups)

    def rejoin(self) -> None:
        """With `shard_over`, after the model's `rejoin()`: shares the work over its new group.

        The state is dropped, because parts of it were other ranks'; load it afterwards, with
        `libddp.Snapshot.load` or `load_state_dict`. Settings of the groups (lr) stay. Until it is
        called, step(), state_dict() and load_state_dict() raise StateError. Without `shard_over`
        nothing is to be done, and nothing happens.

        Note:
            A collective, as the construction is: survivors call it where newcomers make theirs.
        """
        if self._shards is not None:
            self._shards = self._shards.rejoined()
            self.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """torch's, with whole tensors; with `shard_over` it may be a collective, see above."""
        if self._shards is not None:
            self._shards.check_member()
        state_dict = super().state_dict()
        if self._shards is None:
            return state_dict
        return self._shards.whole(state_dict, self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state of torch's AdamW or of this one, saved by any number of ranks."""
        if self._shards is not None:
            self._shards.check_member()
        super().load_state_dict(state_dict)
        for parameter, entries in self.state.items():
            if "step" in entries:  # torch's AdamW counts in the default dtype, on the host
                entries["step"] = torch.as_tensor(
                    entries["step"], dtype=torch.float32, device=parameter.device
                )
        if self._shards is not None:
            self._shards.cut(self.state)

    def __getstate__(self) -> dict[str, Any]:
        if self._shards is not None:
            raise StateError(
                "libddp: AdamW with shard_over cannot be copied or pickled, as the ranks share its "
                "state. Hint: copy or save its state_dict()."
            )
        return super().__getstate__()

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None):
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._shards is not None and not self._shards.begin():
            return loss
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._begin(parameters, group["amsgrad"])
                self._update(parameters, group)
        if self._shards is not None:
            self._shards.publish()
        return loss

    def _begin(self, parameters: list[torch.Tensor], amsgrad: bool) -> None:
        """Moments for those that have none yet."""
        new = [p for p in parameters if not self.state[p]]
        if not new:
            return
        _C.check_adamw_parameters(_dtensors.locals_of(new))
        if self._shards is not None:
            self._shards.add_state(new, self.state)
            return
        local = _dtensors.locals_of(new)
        for parameter, entries in zip(new, _C.make_adamw_state(local, amsgrad), strict=True):
            self.state[parameter].update(_dtensors.like(parameter, entries))

    def _scaling(self, name: str, parameters: list[torch.Tensor]) -> torch.Tensor | None:
        """What a GradScaler has left here: where the loss is, which parameters need not be."""
        value = getattr(self, name, None)
        return None if value is None else value.to(parameters[0].device)

    def _update(self, parameters: list[torch.Tensor], group: dict) -> None:
        states = [self.state[p] for p in parameters]
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        options = {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "amsgrad": group["amsgrad"],
            "maximize": group["maximize"],
            "grad_scale": self._scaling("grad_scale", parameters),
            "found_inf": self._scaling("found_inf", parameters),
        }
        if self._shards is not None:
            self._shards.update(parameters, steps, **options)
            return
        local = _dtensors.locals_of
        _C.fused_adamw(
            local(parameters),
            local([p.grad for p in parameters]),
            local([state["exp_avg"] for state in states]),
            local([state["exp_avg_sq"] for state in states]),
            local([state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []),
            steps,
            **options,
        )
