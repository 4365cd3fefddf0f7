"""Calls a function with a module as soon as that module is there, without importing it for that.

    call("torch.distributed.fsdp", lambda fsdp: ...)   # at once where it has been imported

torch's larger parts take seconds to import, so whoever wants to see them when a script uses them
waits for the script to do it. Python has no event for it; a finder of ours is first in
sys.meta_path as long as somebody waits, and changes nothing of what is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from types import ModuleType

_Function = Callable[[ModuleType], None]
_waiting: dict[str, list[_Function]] = {}


class _Finder:
    """First in sys.meta_path while somebody waits; finds what Python's own finder finds."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        if name not in _waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _execute(execute, module, name)
        return spec


def call(name: str, function: _Function) -> None:
    """Calls `function` with the module `name`: now, or at the end of its first import."""
    if name in sys.modules:
        function(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(function)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def forget(functions: Iterable[_Function]) -> None:
    """Drops the calls of these functions that have not been made."""
    dropped = list(functions)
    for name, waiting in list(_waiting.items()):
        _waiting[name] = [function for function in waiting if function not in dropped]
        if not _waiting[name]:
            del _waiting[name]
    _leave_if_idle()


def _execute(execute, module: ModuleType, name: str) -> None:
    execute(module)
    for function in _waiting.pop(name, ()):
        function(module)
    _leave_if_idle()


def _leave_if_idle() -> None:
    if not _waiting and _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)
