"""Calls a function with a module as soon as that module is there, without importing it for that.

    call("torch.distributed.fsdp", lambda fsdp: ...)   # at once where it has been imported

torch's larger parts take seconds to import, so whoever wants to see them when a script uses them
waits for the script to do it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType

_waiting: dict[str, Callable[[ModuleType], None]] = {}


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


def call(name: str, function: Callable[[ModuleType], None]) -> None:
    """Calls `function` with the module `name`: now, or at the end of its first import."""
    if name in sys.modules:
        function(sys.modules[name])
        return
    _waiting[name] = function
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def forget() -> None:
    """Drops every call that has not been made."""
    _waiting.clear()
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)


def _execute(execute, module: ModuleType, name: str) -> None:
    execute(module)
    function = _waiting.pop(name, None)
    if function is not None:
        function(module)
