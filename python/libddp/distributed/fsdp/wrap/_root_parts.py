"""Parts of the outermost unit that a script calls by themselves, behind the model's forward.

A loss that is computed in chunks calls `model.head` after `model`: with torch the outermost unit
stays whole until the backward pass. Here it shows its rows, so that what a script reads or clears
between the two is what its optimizer has; a call of one of its plain modules makes it whole for as
long as the call lasts, a forward of the unit as any other, and a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from libddp.distributed._exit import describe

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


class Apart:
    """What stands for the forward of a module, as an attribute of it."""

    def __init__(self, root: WrappedModule, module: torch.nn.Module) -> None:
        self._root, self._module = root, module
        #: What stood there, or None, and what runs.
        self._former: Callable | None = vars(module).get("forward")
        self._forward: Callable = module.forward
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root = self._root
        if root.unit.is_whole or root.summoned is not None:
            return self._forward(*args, **kwargs)
        root.model.before_forward(root.unit, is_apart=True)
        try:
            output = self._forward(*args, **kwargs)
        except BaseException as error:
            root.model.forward_failed(root.unit, describe(error))
            raise
        root.model.after_forward(root.unit, output, is_apart=True)
        return output

    def __deepcopy__(self, memo: dict) -> Callable:
        """A copy of the module is an ordinary one."""
        if self._former is not None:
            return deepcopy(self._former, memo)
        return MethodType(type(self._module).forward, memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple:
        return getattr, (self._module, "forward")

    def end(self) -> None:
        attributes = vars(self._module)
        if attributes.get("forward") is not self:  # another one has been put around it
            return
        del attributes["forward"]
        if self._former is not None:
            attributes["forward"] = self._former


class RootParts:
    """Plain modules that own parameters of the root."""

    def __init__(self, root: WrappedModule) -> None:
        registries = {id(registry) for param in root.params for registry, _ in param.places}
        found = {part: None for module in root.modules for part in module.modules()}
        self._root = root
        self._modules = [
            part
            for part in found
            if id(part._parameters) in registries and part not in root.modules
        ]
        self._offered: list[Apart] = []

    def offer(self) -> None:
        """Behind the root's forward. In it they run as they are, so that dynamo sees nothing."""
        self._offered = [Apart(self._root, module) for module in self._modules]

    def withdraw(self) -> None:
        """Before the next one."""
        for apart in self._offered:
            apart.end()
        self._offered.clear()
