"""Activation checkpointing: torch.utils.checkpoint's names and signatures, the work in C++.

    from libddp.utils.checkpoint import checkpoint

    y = checkpoint(block, x, use_reentrant=False)   # block runs again in backward

A block's saved tensors are dropped in the forward pass. The first one that backward needs replays
the block once, with the same random numbers and the same autocast, and the replay ends with the
last tensor that is needed. Nothing per tensor runs in Python. docs/activation.md tells more.

Under torch.compile (while Dynamo or export traces) torch's own function is called: the compiler
knows it by name and recomputes by its own means.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.utils.checkpoint as _theirs
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)

from libddp.utils import _selective
from libddp.utils._checkpoint_call import call, call_as_node, call_module_as_node

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_module",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]

_torch_checkpoint = _theirs.checkpoint
_torch_selective_contexts = _theirs.create_selective_checkpoint_contexts
_torch_checkpoint_sequential = _theirs.checkpoint_sequential

_CHOOSE = (
    "libddp: {name}: the use_reentrant parameter should be passed explicitly. Without it the "
    "reentrant variant runs, as in torch. Hint: use_reentrant=False; it composes with everything."
)


def checkpoint(
    function: Callable | None = None,
    *args,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool | None = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs,
):
    """Calls function(*args, **kwargs) and keeps only its inputs: backward runs it again.

    Args:
        function: a module or any callable; None gives a decorator with these settings.
        *args: its arguments. Tensors among them must not be changed in place before backward.
        use_reentrant: False keeps autograd's graph as without checkpointing. True runs the forward
            pass without a graph and a backward pass inside the backward pass; at least one input
            must then require a gradient, and torch.autograd.grad does not work. None: True, with
            a warning.
        preserve_rng_state: the second run draws the random numbers of the first.
        context_fn: makes two context managers, for the first and for the second run.
        determinism_check: "default" compares shapes, dtypes and devices of both runs; or "none".
        debug: an error of that check lists the operators of both runs.
        early_stop: the second run ends with the last tensor that backward needs. None, which torch
            does not have: unless all saved tensors of the block are small (4,096 elements), when it
            would not pay.
        respect_saved_tensors_hooks: True: results that `context_fn` keeps go through the hooks of
            torch.autograd.graph.saved_tensors_hooks that are in force around the call, in torch's
            own contexts; it has no effect with a torch before 2.15.
        **kwargs: further arguments of `function`; not with use_reentrant=True.

    Returns:
        What `function` returns.

    Raises:
        ValueError: arguments that do not go together.
        CheckpointError: in backward: the second run differed, or an input was changed in place.
            The message names the block.

    Example:
        >>> import torch
        >>> from libddp.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
        >>> torch.equal(x.grad, x.exp())
        True
    """
    settings = {
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
        "respects_hooks": respect_saved_tensors_hooks,
    }
    if function is None and not args:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        return functools.partial(_decorated, use_reentrant, settings)
    return _checkpoint(function, args, kwargs, use_reentrant, settings)


def _checkpoint(function, args: tuple, kwargs: dict, use_reentrant: bool | None, settings: dict):
    if torch.compiler.is_compiling():
        return _compiled(function, args, kwargs, use_reentrant, **settings)
    if use_reentrant is None:
        warnings.warn(_CHOOSE.format(name="checkpoint"), stacklevel=3)
        use_reentrant = True
    if use_reentrant:
        _refuse_for_reentrant(kwargs, settings)
        return call_as_node(function, args, settings["preserve_rng_state"])
    return call(function, args, kwargs, **settings)


def _decorated(use_reentrant: bool | None, settings: dict, function: Callable) -> Callable:
    """A function, since what a class has for a method must be one."""

    @functools.wraps(function)
    def checkpointed(*args, **kwargs):
        return _checkpoint(function, args, kwargs, use_reentrant, settings)

    return checkpointed


def _compiled(
    function, args, kwargs, use_reentrant, *, context_fn, early_stop, respects_hooks, **settings
):
    # Dynamo knows torch's function, and a context_fn only if it is not the default.
    if context_fn is not noop_context_fn:
        settings["context_fn"] = context_fn
    if respects_hooks is not None:
        settings["respect_saved_tensors_hooks"] = respects_hooks
    return _torch_checkpoint(
        function,
        *args,
        use_reentrant=use_reentrant,
        early_stop=early_stop is not False,
        **settings,
        **kwargs,
    )


def checkpoint_module(module: torch.nn.Module, *args, preserve_rng_state: bool = True):
    """Calls module(*args) as one node of autograd's graph: the cheapest form, for plain modules.

    As `checkpoint(..., use_reentrant=False)`, but no graph is recorded in the forward pass, so:
    all that requires a gradient must be parameters of `module` or tensors among `args`; outputs are
    a tensor or a tuple; there are no second derivatives.

    Args:
        module: the block.
        *args: its arguments.
        preserve_rng_state: as for `checkpoint`.

    Returns:
        What the module returns.

    Raises:
        RuntimeError: in backward: the block used something else that requires a gradient, or an
            input was changed in place. The message names the block.

    Note:
        No counterpart in torch. For the wrapper: checkpoint_wrapper(m,
        checkpoint_fn=checkpoint_module).

    Example:
        >>> import torch
        >>> from libddp.utils.checkpoint import checkpoint_module
        >>> layer = torch.nn.Linear(2, 2)
        >>> checkpoint_module(layer, torch.ones(1, 2)).sum().backward()
        >>> layer.bias.grad
        tensor([1., 1.])
    """
    if torch.compiler.is_compiling():
        return _torch_checkpoint(
            module, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
    return call_module_as_node(module, args, preserve_rng_state)


def create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation=False):
    """Contexts for `checkpoint(context_fn=...)` that keep the results of chosen operators.

    Args:
        policy_fn_or_list: a list of operators (torch.ops.aten.mm.default, ...) whose results are
            kept, all else is recomputed, in C++; or torch's policy function, called by torch's own
            contexts for each operator.
        allow_cache_entry_mutation: kept results may be changed in place.

    Returns:
        The context of the forward pass and that of the recomputation.

    Raises:
        ValueError: an entry of the list is no operator overload, or changes its arguments.
            Operators that return views may be named; they run again, which costs nothing.

    Note:
        While torch.compile or another mode of torch traces, and for higher-order operators, the
        contexts are torch's.

    Example:
        >>> import functools, torch
        >>> from libddp.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        >>> products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        >>> contexts = functools.partial(create_selective_checkpoint_contexts, products)
        >>> layer = torch.nn.Linear(2, 2)
        >>> y = checkpoint(layer, torch.ones(1, 2), use_reentrant=False, context_fn=contexts)
        >>> y.sum().backward()
    """
    contexts = _selective.contexts(policy_fn_or_list, allow_cache_entry_mutation)
    if contexts is not None:
        return contexts
    return _torch_selective_contexts(policy_fn_or_list, allow_cache_entry_mutation)


def _refuse_for_reentrant(kwargs: dict, settings: dict) -> None:
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if (
        settings["context_fn"] is not noop_context_fn
        or settings["debug"] is not False
        or settings["respects_hooks"] is not None
    ):
        raise ValueError(
            "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported "
            "when use_reentrant=False."
        )


def checkpoint_sequential(functions, segments: int, input, use_reentrant=None, **kwargs):
    """Runs modules one after the other in `segments` groups; all but the last are checkpointed.

    Args:
        functions: a torch.nn.Sequential, or a list of modules or functions.
        segments: number of groups.
        input: what the first one gets.
        use_reentrant: as for `checkpoint`.
        preserve_rng_state: as for `checkpoint`.

    Returns:
        What the last one returns.

    Raises:
        ValueError: an unknown keyword argument; fewer functions than segments.

    Example:
        >>> import torch
        >>> from libddp.utils.checkpoint import checkpoint_sequential
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> x = torch.ones(2, 4, requires_grad=True)
        >>> checkpoint_sequential(layers, 2, x, use_reentrant=False).shape
        torch.Size([2, 4])
    """
    if torch.compiler.is_compiling():
        return _torch_checkpoint_sequential(
            functions, segments, input, use_reentrant=use_reentrant, **kwargs
        )
    if use_reentrant is None:
        warnings.warn(_CHOOSE.format(name="checkpoint_sequential"), stacklevel=2)
        use_reentrant = True
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if isinstance(functions, torch.nn.Sequential):
        functions = list(functions.children())
    size = len(functions) // segments
    if size == 0:
        raise ValueError(
            f"libddp: checkpoint_sequential: {len(functions)} functions do not make {segments} "
            "segments. Hint: at most one segment per function."
        )
    last = size * (segments - 1)
    for start in range(0, last, size):
        input = checkpoint(
            _Segment(functions, start, start + size),
            input,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve,
        )
    return _Segment(functions, last, len(functions))(input)


class _Segment:
    """functions[start:end], one after the other."""

    def __init__(self, functions: list, start: int, end: int):
        self.functions = functions[start:end]
        self._libddp_block_name = f"segment {start}..{end - 1}"

    def __call__(self, input):
        for function in self.functions:
            input = function(input)
        return input
