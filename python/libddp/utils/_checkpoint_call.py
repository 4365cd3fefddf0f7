"""How `checkpoint(use_reentrant=False)` calls the extension."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils.checkpoint as _theirs
from torch.utils.checkpoint import CheckpointError, noop_context_fn

from libddp._load import load
from libddp.errors import ArgumentError
from libddp.utils import _selective

_CHECKS = {"default": True, "none": False}
_C = load()
#: (preserve_rng_state, early_stop, compare) -> settings
_settings = {
    (preserve, stop, compare): _C.CheckpointSettings(preserve, stop, compare)
    for preserve in (False, True)
    for stop in (None, False, True)
    for compare in (False, True)
}


def call(
    function: Callable,
    args: tuple,
    kwargs: dict,
    preserve_rng_state: bool,
    context_fn: Callable,
    determinism_check: str,
    debug: bool,
    early_stop: bool | None,
    respects_hooks: bool | None = None,
):
    """function(*args, **kwargs), to be run again in backward."""
    if determinism_check not in _CHECKS:
        raise ValueError(
            f"determinism_check should be one of {list(_CHECKS)}, but got {determinism_check}"
        )
    # torch's context managers set these; they rule both implementations.
    if _theirs._checkpoint_debug_enabled is not None:
        debug = _theirs._checkpoint_debug_enabled
    if _theirs._enable_checkpoint_early_stop is not None:
        early_stop = _theirs._enable_checkpoint_early_stop
    on_error = None
    if debug:
        context_fn, on_error = _debug_context(context_fn)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    settings = _settings[bool(preserve_rng_state), early_stop, _CHECKS[determinism_check]]
    first = second = function
    runs = None
    if context_fn is not noop_context_fn:
        runs = first_context, second_context = _selective.made(context_fn, respects_hooks)
        if type(first_context) is not _C.SavingRun or type(second_context) is not _C.ReplayRun:
            first, second = _First(first_context, function), _Within(second_context, function)
            runs = None
    if torch._C._len_torch_function_stack():
        second = _within_device(second)
    return _C.checkpoint(first, second, name_of, settings, args, kwargs, on_error, runs)


def call_as_node(function: Callable, args: tuple, preserve_rng_state: bool):
    """function(*args) without a graph; backward runs it again, and a backward pass of its own."""
    _theirs.check_backward_validity(args)
    return _C.checkpoint_node(function, name_of, bool(preserve_rng_state), args)


def call_module_as_node(module: torch.nn.Module, args: tuple, preserve_rng_state: bool):
    """module(*args) without a graph; its parameters' gradients flow in the outer graph."""
    parameters = _parameters_of(module)
    return _C.checkpoint_node(module, name_of, bool(preserve_rng_state), args, parameters, False)


#: Where libddp.distributed.fsdp keeps the state of a wrapped module.
_WRAPPED = "_libddp_wrapped_module"


def _parameters_of(module: torch.nn.Module) -> list:
    """As module.parameters(), at a fraction of its time."""
    if _WRAPPED in module.__dict__:
        raise ArgumentError(
            f"libddp checkpoint_module: {name_of(module)} is a unit of FSDP: outside of its calls "
            "its parameters are shards, which have other shapes. Hint: checkpoint inside of the "
            "unit (FSDP around the wrapper), or use checkpoint(..., use_reentrant=False)."
        )
    found = [p for p in module._parameters.values() if p is not None]
    for child in module._modules.values():
        if child is not None:
            found += _parameters_of(child)
    return found


def name_of(function: Callable) -> str:
    """How messages call a block: its class or function, and where it stands if that is known."""
    while isinstance(function, _Within):
        function = function.function
    place = getattr(function, "_libddp_block_name", None)
    if isinstance(function, torch.nn.Module):
        kind = type(function).__name__
    else:
        kind = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{kind} {place}" if place else kind


class _Within:
    """A function that runs inside a context manager."""

    def __init__(self, context, function: Callable):
        self.context = context
        self.function = function

    def __call__(self, *args, **kwargs):
        with self.context:
            return self.function(*args, **kwargs)


class _First(_Within):
    """The run whose result the caller gets."""

    def __call__(self, *args, **kwargs):
        with self.context:
            return self.function(*args, **kwargs)
        raise RuntimeError(
            f"libddp checkpoint of {name_of(self)}: the forward context provided by context_fn "
            "suppressed an exception raised during the checkpointed forward, so there is no "
            "result. Hint: catch the exception inside the block, or outside checkpoint()."
        )


def _within_device(function: Callable) -> Callable:
    """Under the torch.device context that is in force now, if there is one."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return _Within(DeviceContext(mode.device), function)
    return function


def _debug_context(context_fn: Callable):
    """torch's context that lists operators, and what adds the lists to an error."""
    if context_fn is not noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    context_fn, add_lists = _theirs._get_debug_context_and_cb()
    return context_fn, lambda message: add_lists(CheckpointError(message))
