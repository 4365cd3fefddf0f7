"""Which modules are wrapped, and which parameters no wrapped module has."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from libddp.distributed.fsdp.wrap import _tied
from libddp.errors import ArgumentError

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule

#: Attribute of a wrapped module.
WRAPPED = "_libddp_wrapped_module"


def wrapped_module_of(module: torch.nn.Module) -> WrappedModule | None:
    """The state of a module that is wrapped itself."""
    return module.__dict__.get(WRAPPED)


def wrapped_modules_in(module: torch.nn.Module) -> Iterator[WrappedModule]:
    """Of `module` and everything under it, in the order of modules(), each once; of a module with
    several units all of them.
    """
    found = (wrapped_module_of(child) for child in module.modules())
    for wrapped in dict.fromkeys(wrapped for wrapped in found if wrapped is not None):
        yield from wrapped.together


def by_levels(
    module: torch.nn.Module, ignored: Container[torch.nn.Module] = ()
) -> list[tuple[str, torch.nn.Module]]:
    """The module and those under it that no wrapped module under it has, with names, in the order
    in which torch takes them: level by level.
    """
    found, known = [("", module)], {module}
    for prefix, part in found:  # which grows
        for name, child in part.named_children():
            if child in known or child in ignored or wrapped_module_of(child) is not None:
                continue
            known.add(child)
            found.append((f"{prefix}.{name}" if prefix else name, child))
    return found


def own_parameters(
    module: torch.nn.Module, ignored: Iterable[torch.nn.Parameter] = ()
) -> list[tuple[str, torch.nn.Parameter]]:
    """Those of `module` that no wrapped module under it has; shared ones once.

    Raises:
        ArgumentError: a wrapped module under it has one that a module outside of it uses as well.
    """
    taken = {id(parameter) for parameter in ignored}
    owners: dict[int, torch.nn.Module] = {}
    inside: set[int] = set()
    for child in wrapped_modules_in(module):
        if module in child.modules:
            continue
        # A module outside may have the parameter that is a DTensor inside now.
        owners.update((id(param.unsharded), child.module) for param in child.params)
        for other in child.modules:
            owners.update((id(p), other) for p in other.parameters())
            inside.update(id(part) for part in other.modules())
    for name, part in module.named_modules():
        if id(part) in inside:
            continue
        for own, parameter in part.named_parameters(name, recurse=False):
            if id(parameter) not in owners or id(parameter) in taken:
                continue
            owner = wrapped_module_of(owners[id(parameter)])
            tied = _tied.find(owner, parameter)
            if tied is None or not _tied.has_no_other(part, parameter):
                _refuse_shared(module, own, owners[id(parameter)])
            owner.take_in(part, tied)
    taken.update(owners)
    return [(n, p) for n, p in module.named_parameters() if id(p) not in taken]


def own_parameters_of(modules, ignored) -> list[tuple[str, torch.nn.Parameter]]:
    """The same of several modules that are one unit; names tell them apart."""
    if len(modules) == 1:
        return own_parameters(modules[0], ignored)
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for index, module in enumerate(modules):
        for name, parameter in own_parameters(module, ignored):
            found.setdefault(id(parameter), (f"{index}.{name}", parameter))
    return list(found.values())


def _refuse_shared(module: torch.nn.Module, name: str, owner: torch.nn.Module) -> None:
    where = next((n for n, part in module.named_modules() if part is owner), type(owner).__name__)
    raise ArgumentError(
        f"libddp fsdp: parameter {name!r} of {type(module).__name__} belongs to the wrapped module "
        f"{where!r} too, and would be whole only while that one runs. Hint: leave {where!r} "
        "unwrapped, so that one unit has all modules that use the parameter."
    )
