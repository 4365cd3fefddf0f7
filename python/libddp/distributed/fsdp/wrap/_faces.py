"""What the C++ model calls where scripts see DTensors: which of its two forms a parameter shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from libddp._load import load
from libddp.distributed.fsdp.wrap._sharded_param import NOTHING

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule

_C = load()


class Faces:
    """Of a whole model: what the C++ model calls."""

    def __init__(self, wrapped_modules: list[WrappedModule]) -> None:
        self._wrapped_modules = wrapped_modules
        self._by_unit = {id(wrapped.unit): wrapped for wrapped in wrapped_modules}

    def show(self, unit: Any, whole: bool) -> None:
        """The unit's parameters are whole from now on, or no longer."""
        self._by_unit[id(unit)].show(sharded=not whole)

    def take_over(self) -> None:
        """A step or a pass begins."""
        for wrapped in self._wrapped_modules:
            if wrapped.is_held:
                continue
            _C.take_over_faces(wrapped.rows, NOTHING)
            for param in wrapped.params if not wrapped.rows else ():
                param.take_over()

    def show_gradients(self) -> None:
        """A pass has ended."""
        for wrapped in self._wrapped_modules:
            self._show_gradients(wrapped)

    def show_gradients_of(self, unit: Any) -> None:
        """The averages of a unit are there, in the middle of a pass."""
        self._show_gradients(self._by_unit[id(unit)])

    @staticmethod
    def _show_gradients(wrapped: WrappedModule) -> None:
        _C.show_face_gradients(wrapped.rows)
        for param in wrapped.params if not wrapped.rows else ():
            param.show_gradient()

    def has_late_hooks(self, unit: Any) -> bool:
        wrapped = self._by_unit[id(unit)]
        if wrapped.rows:
            return _C.have_face_hooks(wrapped.rows)
        return any(param.has_hooks() for param in wrapped.params)

    @torch.no_grad()
    def run_late_hooks(self, unit: Any) -> None:
        wrapped = self._by_unit[id(unit)]
        if wrapped.rows and not _C.have_face_hooks(wrapped.rows):
            return
        params = [param for param in wrapped.params if param.has_hooks()]
        if params:
            averaged = set(unit.averaged())
            for param in params:
                if param.name in averaged:
                    param.run_hooks()
