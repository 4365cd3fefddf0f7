"""auto_wrap_policy: which modules become units, and what the units are called."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial

import torch
from torch.distributed.fsdp._common_utils import _override_module_mixed_precision
from torch.distributed.fsdp._wrap_utils import _warn_on_overridden_mixed_precision
from torch.distributed.fsdp.wrap import (
    _or_policy,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
    _run_mixed_precision_override_policy,
    _wrap_module_cls_individually,
)

from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._names import names_of
from libddp.errors import ArgumentError

#: Names of the modules in the model that is being wrapped.
_names: ContextVar[dict[int, str] | None] = ContextVar("names", default=None)


def name_of(module: torch.nn.Module) -> str:
    """Its name in the model, as far as it is known; the outermost one's class otherwise."""
    names = _names.get() or {}
    return names.get(id(module)) or type(module).__name__


def wrap_children(module: torch.nn.Module, policy, wrapper, ignored, **arguments) -> None:
    """Wraps the modules under `module` that the policy chooses, innermost first.

    Raises:
        ArgumentError: something under it is wrapped already; the policy is none, or one of classes
            that the module has no instance of.
    """
    for wrapped in wrapped_modules_in(module):
        raise ArgumentError(
            "libddp fsdp: FSDP auto wrapping requires modules to not already have FSDP applied but "
            f"found {names_of(module.named_modules())[id(wrapped.module)]} in "
            f"{type(module).__name__}, a {type(wrapped.module).__name__} that is wrapped already. "
            "Hint: wrap by hand, or by policy."
        )
    _refuse_empty(module, policy)
    token = _names.set(names_of(module.named_modules()))
    try:
        classes = _in_full_precision(module, arguments["mixed_precision"])
        if isinstance(policy, _Policy):
            _by_policy(module, policy, wrapper, ignored, arguments, classes)
        elif callable(policy):
            apart = partial(_wrap_module_cls_individually, module_classes=classes)
            _recursive_wrap(
                module=module,
                auto_wrap_policy=partial(_or_policy, policies=[policy, apart]),
                wrapper_cls=wrapper,
                ignored_modules=ignored.modules,
                ignored_params=ignored.parameters,
                only_wrap_children=True,
                **arguments,
            )
        else:
            raise ArgumentError(
                f"libddp fsdp: auto_wrap_policy={policy!r} is no policy. "
                "Hint: see libddp.distributed.fsdp.wrap."
            )
    finally:
        _names.reset(token)


def _refuse_empty(module: torch.nn.Module, policy) -> None:
    """A policy of classes that chooses nothing is a mistake: of a class, or of a model."""
    classes = getattr(policy, "_module_classes", None)
    if classes is None:
        classes = getattr(policy, "keywords", {}).get("transformer_layer_cls")
    if classes is None or any(isinstance(part, tuple(classes)) for part in module.modules()):
        return
    names = ", ".join(sorted(kind.__name__ for kind in classes)) or "no class"
    raise ArgumentError(
        f"libddp fsdp: auto_wrap_policy is for {names}, and {type(module).__name__} has no such "
        "module. Hint: name the class of its blocks, or leave auto_wrap_policy out."
    )


def _in_full_precision(module: torch.nn.Module, precision) -> tuple[type, ...]:
    """Classes of modules that mixed precision leaves alone: each becomes a unit without it.

    torch's hooks convert what goes into such a module and what comes out.
    """
    if precision is None:
        return ()
    classes = tuple(precision._module_classes_to_ignore)
    _warn_on_overridden_mixed_precision(_override_module_mixed_precision(module, classes))
    return classes


def _by_policy(module, policy: _Policy, wrapper, ignored, arguments, classes) -> None:
    chosen = policy._run_policy(module, ignored.modules, dict(arguments))
    chosen = _run_mixed_precision_override_policy(
        module, classes, ignored.modules, dict(arguments), chosen
    )
    chosen.pop(module, None)

    def wrap(part: torch.nn.Module) -> torch.nn.Module | None:
        return wrapper(part, **chosen[part]) if part in chosen else None

    _post_order_apply(module, wrap)
