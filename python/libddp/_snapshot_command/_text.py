"""Texts of others (names of tensors, values, paths) as they may stand on a terminal, and cut."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Of a text, of the items of a list or dict, of levels.
_MAX_TEXT, _MAX_ITEMS, _MAX_DEPTH = 60, 6, 4


def shown(text: str) -> str:
    """ASCII without control characters.

    >>> shown("w\\x1b[2J")
    'w\\\\x1b[2J'
    """
    return ascii(text)[1:-1]


def shown_path(path: Path | bytes) -> str:
    """As it is, but for what moves a cursor or is no UTF-8."""
    text = os.fsdecode(path)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def brief(value: Any, depth: int = 0) -> str:
    """A value of JSON on one line, cut where it is long.

    >>> brief({"lr": 0.1, "list": list(range(100))})
    "{'lr': 0.1, 'list': [0, 1, 2, 3, 4, 5, ... 94 more]}"
    """
    if isinstance(value, str):
        rest = len(value) - _MAX_TEXT
        return ascii(value[:_MAX_TEXT]) + (f"... {rest} more" if rest > 0 else "")
    if not isinstance(value, (dict, list)):
        return ascii(value)
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    if depth == _MAX_DEPTH and value:
        return f"{opening}{len(value)} items{closing}"
    if isinstance(value, dict):
        items = [f"{brief(k)}: {brief(v, depth + 1)}" for k, v in list(value.items())[:_MAX_ITEMS]]
    else:
        items = [brief(item, depth + 1) for item in value[:_MAX_ITEMS]]
    if len(value) > _MAX_ITEMS:
        items.append(f"... {len(value) - _MAX_ITEMS} more")
    return opening + ", ".join(items) + closing


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Columns under each other, two blanks between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def listed(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges.

    >>> listed([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def when(seconds: float | None) -> str:
    """A time of a file, of this machine's zone."""
    if seconds is None:
        return "?"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
