"""Where in the program an exception came from: the line that its author can look at.

Loads nothing: a process that ends before a group asks too, and the launcher.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

_Place = tuple[str, int]

#: Python's own, in which an environment's packages may lie.
_STANDARD = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_PACKAGES = tuple(_STANDARD + name for name in ("site-packages", "dist-packages"))
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


def program_line(error: BaseException) -> _Place | None:
    """Path and number of the program's innermost line under an exception."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return innermost(places)


def places_in(traceback: str) -> list[_Place]:
    """The places that a printed traceback names, in its order."""
    return [(path, int(line)) for path, line in _FRAME.findall(traceback)]


def innermost(places: Iterable[_Place]) -> _Place | None:
    """Of places from the outermost to the innermost, the last one that is a program's.

    The outermost where there is none.
    """
    places = list(places)
    libraries = _folders("torch", "libddp")
    own = [place for place in places if _is_program(place[0], libraries)]
    return (own or places[:1] or [None])[-1]


def _is_program(path: str, libraries: tuple[str, ...]) -> bool:
    if path.startswith("<frozen "):
        return False
    path = os.path.abspath(path)
    if path.startswith(_STANDARD) and not path.startswith(_PACKAGES):
        return False
    return not path.startswith(libraries)


def _folders(*modules: str) -> tuple[str, ...]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    return tuple(os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in files if file)
