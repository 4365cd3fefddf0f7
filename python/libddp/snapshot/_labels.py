"""Labels: files that stand where another library has a checkpoint, and name a step of a Snapshot.

write_label("out/last.ckpt", 700)
read_label("out/last.ckpt") == 700     # None for a file that is none
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from libddp._whole_file import write_text
from libddp.errors import ArgumentError

_MAX_LABEL_BYTES = 4096


def write_label(path: str | os.PathLike, step: int) -> None:
    """Puts a label in the place of a checkpoint."""
    path = Path(path)
    if path.is_dir():
        path /= "snapshot.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"libddp-snapshot": step}))


def read_label(path: str | os.PathLike) -> int | None:
    """The step that a label names; None for another file.

    Raises:
        ArgumentError: there is nothing at the path.
    """
    path = Path(path)
    if path.is_dir():
        path /= "snapshot.json"
        if not path.exists():
            return None
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_LABEL_BYTES)
    except FileNotFoundError:
        raise ArgumentError(
            f"libddp snapshot: there is no checkpoint at {path}. Hint: '' loads the newest."
        ) from None
    try:
        found = json.loads(text)
    except (UnicodeDecodeError, ValueError):
        return None
    step = found.get("libddp-snapshot") if isinstance(found, dict) else None
    return step if type(step) is int else None


def read_file(path: str | os.PathLike) -> dict[str, Any]:
    """What torch.save wrote: tensors and plain values, no code."""
    return torch.load(path, map_location="cpu", weights_only=True)
