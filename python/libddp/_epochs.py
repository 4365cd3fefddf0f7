"""What must be let go of before this process joins another group, in one and the same process.

    _epochs.before_next(function)     # at import of who keeps such things
    _epochs.end()                     # libddp.elastic.run, between two epochs

Thread rule: the first thread.
"""

from __future__ import annotations

from collections.abc import Callable

_functions: list[Callable[[], None]] = []


def before_next(function: Callable[[], None]) -> None:
    """Calls it at the end of each epoch."""
    _functions.append(function)


def end() -> None:
    """This process leaves its groups."""
    for function in _functions:
        function()
