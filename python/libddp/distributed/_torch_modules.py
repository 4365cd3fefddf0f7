"""Modules under torch.distributed that libddp has nothing of its own in, by libddp's path.

    import libddp.distributed.checkpoint   # torch.distributed.checkpoint itself

Python's own finder would read such a module a second time, with classes of its own, once its parent
is torch's; so this one comes first. What libddp has a file for is left to Python.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_OURS = "libddp.distributed"
_TORCHS = "torch.distributed"
_FOLDER = Path(__file__).parent


class _Loader:
    """Gives torch's module, which stays what it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has put that of this name there, where a module lets it.
        if getattr(module, "__spec__", None) is not self._spec:
            module.__spec__ = self._spec


class _Finder:
    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if not name.startswith(f"{_OURS}.") or _is_ours(name):
            return None
        torchs = _TORCHS + name[len(_OURS) :]
        try:
            found = find_spec(torchs)
        except ModuleNotFoundError:  # a parent
            return None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, _Loader(torchs), origin=found.origin, is_package=is_package)


def install() -> None:
    """Once, before anything of `libddp.distributed` is imported."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _is_ours(name: str) -> bool:
    place = _FOLDER.joinpath(*name[len(_OURS) + 1 :].split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()
