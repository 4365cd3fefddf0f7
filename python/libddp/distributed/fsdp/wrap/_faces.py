"""What the C++ model calls where scripts see DTensors: which of its two forms a parameter shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from libddp.distributed.fsdp.wrap._sharded_param import NOTHING
from libddp.distributed.fsdp.wrap._unchecked import unchecked

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


class Faces:
    """Of a whole model. What is done for `rows` of a WrappedModule is done in C++ (PythonFaces in
    the bindings); the methods are for one that has none, and for one that has hooks.
    """

    nothing = NOTHING

    def __init__(self, wrapped_modules: list[WrappedModule]) -> None:
        self.wrapped_modules = wrapped_modules

    @staticmethod
    def show(wrapped: WrappedModule, sharded: bool) -> None:
        """Its parameters are whole from now on, or no longer."""
        with unchecked():
            wrapped.show(sharded)

    @staticmethod
    def take_over(wrapped: WrappedModule) -> None:
        """A step or a pass begins."""
        with unchecked():
            for param in wrapped.params:
                param.take_over()

    @staticmethod
    def show_gradients(wrapped: WrappedModule) -> None:
        """A pass has ended, or averages are there in the middle of one."""
        with unchecked():
            for param in wrapped.params:
                param.show_gradient()

    @staticmethod
    def has_late_hooks(wrapped: WrappedModule) -> bool:
        return any(param.has_hooks() for param in wrapped.params)

    @staticmethod
    @torch.no_grad()
    def run_late_hooks(wrapped: WrappedModule, unit: Any) -> None:
        params = [param for param in wrapped.params if param.has_hooks()]
        if not params:
            return
        averaged = set(unit.averaged())
        with unchecked():
            for param in params:
                if param.name in averaged:
                    param.run_hooks()
