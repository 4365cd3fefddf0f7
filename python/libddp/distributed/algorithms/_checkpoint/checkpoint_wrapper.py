"""Modules whose forward pass is checkpointed: torch's names, on libddp's checkpoint.

    from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))

The wrapper is a subclass of torch's, so FSDP, DCP and state dicts treat it as torch's: names of
parameters stay those of the bare model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as _theirs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    OffloadWrapper,
    offload_wrapper,
)

from libddp.utils.checkpoint import checkpoint

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "OffloadWrapper",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
]

_PREFIX = _theirs._CHECKPOINT_PREFIX
_TorchWrapper = _theirs.CheckpointWrapper
_torch_apply = _theirs.apply_activation_checkpointing


class CheckpointWrapper(_TorchWrapper):
    """A module that runs again in backward. Made by `checkpoint_wrapper`."""

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable | None = None,
        **checkpoint_fn_kwargs,
    ):
        super().__init__(mod, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)
        if checkpoint_fn is None:
            is_reentrant = checkpoint_impl == CheckpointImpl.REENTRANT
            self.checkpoint_fn = partial(
                checkpoint, use_reentrant=is_reentrant, **checkpoint_fn_kwargs
            )


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable | None = None,
    **checkpoint_fn_kwargs,
) -> nn.Module:
    """Wraps a module so that each call of it is checkpointed.

    Args:
        module: what to wrap; its attributes and items stay reachable through the wrapper.
        checkpoint_impl: which variant of `libddp.utils.checkpoint.checkpoint`.
        checkpoint_fn: a function to call in its stead.
        **checkpoint_fn_kwargs: its settings, such as `early_stop` or `context_fn`.

    Returns:
        The wrapper. Its state dict has the names of the bare module.

    Example:
        >>> import torch
        >>> from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        ...     checkpoint_wrapper,
        ... )
        >>> list(checkpoint_wrapper(torch.nn.Linear(2, 2)).state_dict())
        ['weight', 'bias']
    """
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Callable | None = None,
) -> None:
    """Wraps, in place, the modules within `model` that are chosen. Not `model` itself.

    Args:
        model: before or after it is wrapped by DDP or FSDP.
        checkpoint_wrapper_fn: makes the wrapper; `offload_wrapper` keeps activations in host memory
            instead.
        check_fn: says which modules.
        auto_wrap_policy: an FSDP wrapping policy that says so instead.

    Note:
        Errors of a wrapped module name its place in `model`, such as "Block h.3".
    """
    _torch_apply(model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)
    for name, module in model.named_modules():
        if isinstance(module, CheckpointWrapper):
            place = name.replace(_PREFIX, "")
            module._checkpoint_wrapped_module._libddp_block_name = place
