"""Text files that are whole or not there, whenever somebody looks and whoever is killed.

    write_text(path, text)

Thread rule: one thread for a path; processes do not disturb each other.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: str | os.PathLike, text: str) -> None:
    """In place of what is there, at once; leaves nothing else behind.

    A device or a pipe (/dev/null, /dev/stdout) stays what it is, and gets the text.

    Raises:
        OSError: the system refuses; what was there stays.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
