"""How far a rank has come: the last step that it has stored.

    libddp._worker.note_step(step)      # in a worker, as often as one likes: no system call
    _steps.noted()                      # None: nobody has said
    _steps.read(folder)                 # in the launcher, of a worker that runs or has ended

A worker of `libddp run` has a page beside its error file, which the launcher reads; elsewhere the
number stays in the process. Thread rule: one thread at a time notes.
"""

from __future__ import annotations

import mmap
import os
import struct

_NAME = "step"
_WORD = struct.Struct("<q")
_UNKNOWN = -1

_step: int | None = None
_page: mmap.mmap | None = None


def open_page(error_file: str | None) -> None:
    """In a worker: from now on the launcher sees what is noted.

    Args:
        error_file: what torch's launcher named; steps stay in this process where it named none.
    """
    global _page
    if not error_file or error_file == os.devnull:
        return
    try:
        with open(os.path.join(os.path.dirname(error_file), _NAME), "w+b") as file:
            file.write(_WORD.pack(_UNKNOWN))
            file.flush()
            _page = mmap.mmap(file.fileno(), _WORD.size)
    except OSError:
        _page = None  # the launcher shows no step then


def note(step: int) -> None:
    global _step
    _step = int(step)
    if _page is not None:
        _WORD.pack_into(_page, 0, _step)


def noted() -> int | None:
    return _step


def read(folder: str) -> int | None:
    """The step of the worker whose error file is in this folder."""
    try:
        with open(os.path.join(folder, _NAME), "rb") as file:
            (step,) = _WORD.unpack(file.read(_WORD.size))
    except (OSError, struct.error):
        return None
    return None if step == _UNKNOWN else step
