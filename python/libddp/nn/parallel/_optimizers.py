"""Optimizers that step inside the backward pass, as soon as a bucket is averaged."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.autograd import Variable

from libddp.errors import StateError

_OPTIMIZERS = "_in_backward_optimizers"


class StepsInBackward:
    """The part of DistributedDataParallel that runs optimizers in the backward pass."""

    def _register_fused_optim(self, optim: type, *args, optim_params=None, **kwargs) -> None:
        """Steps each parameter with `optim(*args, **kwargs)` once its bucket is averaged.

        Args:
            optim: one of torch's optimizers that has a functional form (SGD, Adam, AdamW, ...).
            optim_params: the parameters to step; None = all.

        Raises:
            StateError: the optimizer has no such form; a communication hook is registered already;
                a backward pass has run.

        Note:
            As torch: not with register_comm_hook, gradient accumulation or `no_sync`.
        """
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        try:
            overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
            overlapped.register_ddp(_OwnGroup(self))
        except (NotImplementedError, ValueError) as error:
            raise StateError(
                f"{optim} does not support overlapped DDP: {error}. Hint: step it after backward()."
            ) from error

    def _setup_in_backward_optimizers(self) -> None:
        """Takes over from torch.distributed.optim._apply_optimizer_in_backward.

        torch's hooks would step with this rank's gradient, before it is averaged.
        """
        parameters = [p for p in self._module_parameters if hasattr(p, _OPTIMIZERS)]
        if not parameters:
            return
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        for parameter in parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()
        self._stepped: set[torch.Tensor] = set()
        self._replica.register_comm_hook(weakref.ref(self), average_and_step)


class _OwnGroup:
    """Registers torch's hook with the model's group; torch's own code takes the default group."""

    def __init__(self, ddp) -> None:
        self._ddp = ddp

    def register_comm_hook(self, state, hook) -> None:
        group = self._ddp.process_group
        if state is None and group is not dist.group.WORLD:
            state = group
        self._ddp.register_comm_hook(state, hook)


def average_and_step(ddp_ref, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: averages the bucket, then steps the parameters that have a gradient.

    A parameter that only other ranks used gets its gradient at the end of the pass, and is stepped
    then; all ranks take the same step. Gradients are None after the pass.
    """
    ddp = ddp_ref()
    buffer = bucket.buffer()
    parameters = bucket.parameters()
    gradients = [buffer]
    if not buffer.is_sparse:
        gradients = list(map(laid_out, bucket.gradients(), parameters))
    members = list(zip(parameters, gradients, strict=True))
    is_in_backward = torch._C._current_graph_task_id() != -1
    for parameter, gradient in members:
        # Not in backward: this rank has no data, and follows the others. Sparse gradients are no
        # views of their bucket.
        if not is_in_backward or (buffer.is_sparse and parameter.grad is not None):
            parameter.grad = gradient
    stepped = ddp._stepped
    if bucket.is_last() and is_in_backward:
        # The last bucket is sent at the end of the pass, so this is called after that.
        Variable._execution_engine.queue_callback(lambda: finish_pass(ddp))
    work = average(buffer, ddp.process_group)

    def step_members(_future) -> torch.Tensor:
        for parameter, gradient in members:
            if parameter.grad is not None:
                # Where it is a tensor apart, it is this rank's own.
                if not buffer.is_sparse and parameter.grad.data_ptr() != gradient.data_ptr():
                    parameter.grad = gradient
                step(parameter)
                stepped.add(parameter)
        if not is_in_backward and bucket.is_last():
            finish_pass(ddp)
        return buffer

    return work.get_future().then(step_members)


def laid_out(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's piece of a bucket, in which gradients lie as the parameter does."""
    if parameter.is_contiguous():
        return piece
    strides = torch.empty_like(parameter, device="meta").stride()
    if strides != parameter.stride():  # it has gaps: then its gradient is contiguous
        return piece
    return piece.as_strided(parameter.size(), strides)


def average(buffer: torch.Tensor, group) -> dist.Work:
    """In place; sparse tensors know SUM only."""
    if not buffer.is_sparse:
        return dist.all_reduce(buffer, dist.ReduceOp.AVG, group=group, async_op=True)
    buffer.div_(dist.get_world_size(group))
    return dist.all_reduce(buffer, group=group, async_op=True)


def finish_pass(ddp) -> None:
    """Steps what got its gradient from other ranks only; then gradients are None, as in torch."""
    for parameter in ddp._module_parameters:
        if hasattr(parameter, _OPTIMIZERS):
            if parameter.grad is not None and parameter not in ddp._stepped:
                step(parameter)
            parameter.grad = None
    ddp._stepped.clear()


def step(parameter: torch.Tensor) -> None:
    """Runs the optimizers that were given to this parameter."""
    for optimizer in getattr(parameter, _OPTIMIZERS, ()):
        optimizer.step()
