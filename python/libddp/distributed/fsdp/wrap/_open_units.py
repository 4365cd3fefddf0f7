"""Units of several modules, fully_shard([norm, head]): whole from the first of them to the last.

What stands between them in the model's forward may compute with parameters of a module that has
not run yet, or never runs (`head.weight` in a fused loss), as with torch. Outside of the model's
forward each call stands alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


class OpenUnits:
    """Those of one model. A unit that is open runs a forward, as far as its C++ model can tell."""

    def __init__(self) -> None:
        self._num_forwards = 0
        #: open unit -> ids of its modules that have not run yet
        self._open: dict[WrappedModule, set[int]] = {}

    def begin(self) -> None:
        """The root's forward begins."""
        self._num_forwards += 1

    def end(self, output: Any) -> None:
        """It has ended. Backward passes begin at its output for units that are still open."""
        for wrapped in self._rest():
            wrapped.model.after_forward(wrapped.unit, output)

    def fail(self, what: str) -> None:
        """It has failed."""
        for wrapped in self._rest():
            wrapped.model.forward_failed(wrapped.unit, what)

    def enter(self, wrapped: WrappedModule) -> bool:
        """A module of the unit is about to run. Whether the unit is open now."""
        if self._num_forwards > 0 and wrapped not in self._open:
            wrapped.model.before_forward(wrapped.unit)
            self._open[wrapped] = {id(module) for module in wrapped.modules}
        return wrapped in self._open

    def leave(self, wrapped: WrappedModule, module: torch.nn.Module) -> bool:
        """It has run. Whether it was the unit's last: then the caller ends the unit's forward."""
        rest = self._open.get(wrapped)
        if rest is None:
            return False
        rest.discard(id(module))
        if rest:
            return False
        del self._open[wrapped]
        return True

    def _rest(self) -> list[WrappedModule]:
        self._num_forwards -= 1
        if self._num_forwards > 0:
            return []
        rest = list(reversed(self._open))
        self._open.clear()
        return rest
