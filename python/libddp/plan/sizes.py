"""Bytes as people write them.

>>> parse_bytes("8GiB")
8589934592
>>> show_bytes(3 * 2**30 + 2**29)
'3.50 GiB'
"""

from __future__ import annotations

import re

from libddp.errors import ArgumentError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def parse_bytes(text: str) -> int:
    """The number of bytes in "8GiB", "8G" (the same), "8GB" (powers of 1000), "500" (bytes).

    Raises:
        ArgumentError: it is no size, or not above zero.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * factor) if found and factor else 0
    if size < 1:
        raise ArgumentError(
            f"{text!r} is no amount of memory. Hint: a number above zero with a unit, as in 8GiB, "
            "512MiB or 16GB."
        )
    return size


def show_bytes(size: float) -> str:
    """With three digits or so and the unit that suits: "3.50 GiB", "151 MiB", "-" for nothing."""
    if size == 0:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {unit}"
