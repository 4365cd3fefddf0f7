"""Snapshots at an address of fsspec's, as the commands see them.

open_folder("s3://bucket/run").snapshots()
open_folder("out/run").snapshots()
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from libddp._load import load
from libddp._objects import ObjectError, Objects
from libddp._snapshot_command._folder import Folder, Part, Stored
from libddp.errors import SnapshotError
from libddp.snapshot._place import local, objects_at

_C = load()
_OBJECT = re.compile(
    r"step-(\d{1,18})\.(\d{1,18})/rank-(\d{1,9})(?:-of-(\d{1,9}))?\.(\w+)\.(?:json|safetensors)"
)


def open_folder(where: str) -> Folder:
    """A folder, or what is at an address.

    Raises: ArgumentError, it is neither, or this machine cannot reach such addresses.
    """
    path = local(where)
    return _Address(objects_at(path)) if "://" in path else Folder(Path(path))


class _Address(Folder):
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.path = os.fsencode(objects.address)
        self.core = _C.ObjectFolder(objects)

    def modified(self, stored: Stored) -> float | None:
        return self._objects.modified(f"step-{stored.step}.{stored.sequence}/index.json")

    def run(self) -> str:
        return self.core.run()

    def unfinished(self) -> list[Part]:
        parts = [Part(*part, [], 0, 0) for part in self.core.unfinished()]
        names = self._objects.list() if parts else []
        return [self._filled(part, names) for part in parts]

    def index_of_its_own(self) -> dict[str, Any] | None:
        return None

    def _filled(self, part: Part, names: list[str]) -> Part:
        """With what is there of it: an object is there when it is whole."""
        ranks, world_size, size = [], 0, 0
        for name in names:
            found = _OBJECT.fullmatch(name)
            if not found or found[5] != part.start or int(found[2]) != part.sequence:
                continue
            if found[4] is None:
                ranks.append(int(found[3]))
                continue
            world_size = int(found[4])
            try:
                size += self._objects.size(name)
            except ObjectError as error:
                raise SnapshotError(str(error)) from error
        return Part(
            part.step, part.sequence, part.start, part.path, sorted(ranks), world_size, size
        )
