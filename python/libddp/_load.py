"""Loads the extension module `libddp._C`, or says what is wrong in one line.

A C++ extension only works with the torch that it was built for. `_build.py`, written by the build,
says which one that was; a difference is found before the dynamic linker fails with a mangled name.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from libddp._version import __version__


def major_minor(version: str) -> str:
    """ "2.11" of "2.11.0+cu130"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def built_for() -> str:
    """The torch version that the extension was built for.

    Raises:
        ImportError: libddp is not built.
    """
    try:
        return import_module("libddp._build").TORCH_VERSION
    except ImportError as error:
        raise ImportError(
            f"libddp {__version__} has no extension module beside it. Hint: install it with "
            "`pip install .` in a checkout of libddp, and do not run Python inside its python/ "
            "folder."
        ) from error


@cache
def load() -> ModuleType:
    """The extension module.

    Raises:
        ImportError: it was built for another torch, or is missing.
    """
    import torch

    built = built_for()
    if major_minor(built) != major_minor(torch.__version__):
        raise ImportError(
            f"libddp {__version__} was built for torch {built}, but torch {torch.__version__} is "
            "installed. Hint: reinstall libddp (`pip install --force-reinstall --no-deps .`) or "
            f'install "torch=={major_minor(built)}.*".'
        )
    try:
        return import_module("libddp._C")
    except ImportError as error:
        raise ImportError(
            f"libddp {__version__}, built for torch {built}, does not load with torch "
            f"{torch.__version__}: {error}. Hint: reinstall libddp for this torch."
        ) from error
