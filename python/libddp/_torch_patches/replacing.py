"""Puts something in the place of what torch has, and remembers what stood there.

    DROP_IN.put(torch.distributed, "new_group", ours)    # only what the table lists
    DROP_IN.torchs(torch.distributed.new_group)          # torch's own, replaced or not
    DROP_IN.undo()                                       # newest first

There is one `Replacements` for each who asks. Thread rule: one thread at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from libddp._torch_patches import (
    ASKED,
    BY_DROP_IN,
    BY_LAUNCHER,
    BY_SHARDING,
    BY_WRAPPING,
    after_import,
)

_ABSENT = object()


class Replacements:
    """What has been replaced for one who asks."""

    def __init__(self, asked_for_by: str) -> None:
        self._asked_for_by = asked_for_by
        #: (owner, name, replacement, what stood there or _ABSENT), in the order of replacement
        self._done: list[tuple[Any, str, Any, Any]] = []
        #: what waits for a module that is not imported yet
        self._pending: list[Callable] = []

    def __bool__(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._done or self._pending)

    def put(self, owner: Any, name: str, replacement: Any, listed_as: str = "") -> None:
        """`owner.name` is `replacement` from now on.

        Args:
            owner: a module, a class or sys.modules; also the cell of a closure.
            listed_as: its target in the table, where `owner` and `name` do not tell.
        """
        target = listed_as or target_of(owner, name)
        if ASKED.get(target) != self._asked_for_by:
            raise LookupError(f"libddp: {target} is not in the table of libddp._torch_patches")
        former = owner[name] if owner is sys.modules else getattr(owner, name, _ABSENT)
        # A module that was imported in the meantime has the replacement of another place.
        self._done.append((owner, name, replacement, self.torchs(former)))
        _set(owner, name, replacement)

    def put_after_import(self, module: str, function: Callable[[ModuleType], None]) -> None:
        """Calls `function` with a module, now or at the end of its import."""
        self._pending.append(function)
        after_import.call(module, function)

    def torchs(self, found: Any) -> Any:
        """What stood where `found` has been put; `found` itself where it was not put anywhere."""
        for _, _, replacement, former in self._done:
            if replacement is found and former is not _ABSENT:
                return former
        return found

    def undo(self) -> None:
        """Everything is torch's own again; what waits for a module waits no longer."""
        after_import.forget(self._pending)
        self._pending.clear()
        while self._done:
            owner, name, _, former = self._done.pop()
            _set(owner, name, former)


def target_of(owner: Any, name: str) -> str:
    """As the table writes it."""
    if owner is sys.modules:
        return f"sys.modules.{name}"
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    return f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', '')}.{name}"


def _set(owner: Any, name: str, value: Any) -> None:
    if owner is sys.modules:
        owner[name] = value
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


#: Until libddp.uninstall().
DROP_IN = Replacements(BY_DROP_IN)
#: For good.
SHARDING = Replacements(BY_SHARDING)
WRAPPING = Replacements(BY_WRAPPING)
LAUNCHER = Replacements(BY_LAUNCHER)
