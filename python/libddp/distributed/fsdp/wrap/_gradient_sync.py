"""Which units average gradients: what set_requires_gradient_sync has said of each.

torch asks each unit as its gradients come. A C++ model averages those of all its units in a pass,
or of none, so flags that differ are an error. Scripts may set them one unit after the other, so it
is raised where they count: in a forward with gradients, or in a backward pass if they were set
after the forward.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from libddp.errors import StateError

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


def settle(root: WrappedModule) -> None:
    """The model does what the flags of its units say; where they differ, its passes fail."""
    flags = {wrapped.syncs for wrapped in _units_of(root)}
    differed, root.flags_differ = root.flags_differ, len(flags) > 1
    root.model.syncs = root.flags_differ or False not in flags
    if root.flags_differ or differed:
        refuse = partial(_refuse, weakref.proxy(root))  # C++ has it, which no collector sees
        for wrapped in root.all_wrapped:
            wrapped.unit.reduce_by(refuse if root.flags_differ else wrapped.hook)


def check(root: WrappedModule) -> None:
    """Before a forward.

    Raises:
        StateError: its backward pass would average some units' gradients only.
    """
    if root.flags_differ and torch.is_grad_enabled():
        _refuse(root)


def _units_of(root: WrappedModule) -> list[WrappedModule]:
    """Those that have gradients: as with torch, the flags of others say nothing."""
    return [wrapped for wrapped in root.all_wrapped if wrapped.parameters]


def _refuse(root: WrappedModule, *gradients: torch.Tensor) -> NoReturn:
    units = _units_of(root)
    one = next(wrapped for wrapped in units if wrapped.syncs)
    other = next(wrapped for wrapped in units if not wrapped.syncs)
    raise StateError(
        "libddp fsdp: set_requires_gradient_sync: gradients are to be averaged of "
        f"{_name_of(one, root)}, and not of {_name_of(other, root)}; a pass averages those of all "
        "units of a model, or of none. Hint: say the same of all: "
        "model.set_requires_gradient_sync(...) of the outermost module."
    )


def _name_of(wrapped: WrappedModule, root: WrappedModule) -> str:
    if wrapped.is_root:
        return f"the outermost unit, {wrapped.name}"
    names = (n for m in root.modules for n, part in m.named_modules() if part is wrapped.module)
    return f"{next(names, '')!r}, {wrapped.name}"
