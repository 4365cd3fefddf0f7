"""A folder of snapshots as the commands see it.

folder = Folder(Path("out/run"))
snapshot = folder.choose(step=None)          # the newest
folder.read(snapshot).ranks
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libddp._load import load
from libddp._snapshot_command._text import shown_path
from libddp.errors import ArgumentError, SnapshotError

_C = load()
_INDEX, _FORMAT = "index.json", "libddp-snapshot"
#: Of an index; as libddp/slots/json_text.h has it.
_MAX_INDEX_BYTES = 64 << 20
_STORED_RANK = re.compile(r"rank-(\d{1,9})\.json")
_RANK_FILE = re.compile(r"rank-\d{1,9}-of-(\d{1,9})\.safetensors(\.part)?")
#: In place of a start, in the names of snapshots that are being removed.
REMOVED = "old"


@dataclass(frozen=True)
class Stored:
    """A snapshot that has its name."""

    step: int
    #: Number of the save.
    sequence: int
    path: bytes

    @property
    def name(self) -> str:
        return f"step {self.step} (save {self.sequence})"


@dataclass(frozen=True)
class Part:
    """One that is being written, that was left so, or that is being removed."""

    step: int
    sequence: int
    #: Of the job, in file names.
    start: str
    path: bytes
    #: Ranks whose bytes are on the disk.
    stored_ranks: list[int]
    #: 0: not known.
    world_size: int
    bytes: int


class Folder:
    """Raises: ArgumentError, it is no folder."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            what = "a file" if path.exists() else "no folder"
            raise ArgumentError(
                f"{shown_path(path)} is {what}. Hint: pass the folder that libddp.Snapshot was "
                "given."
            )
        self.path: Path | bytes = path
        self.core = _C.SnapshotFolder(os.fsencode(path))

    def snapshots(self) -> list[Stored]:
        """The newest first."""
        return [Stored(*entry) for entry in self.core.list()]

    def unfinished(self) -> list[Part]:
        """The newest first."""
        return [_part(*part) for part in self.core.unfinished()]

    def modified(self, stored: Stored) -> float | None:
        """When its index was written; seconds since 1970."""
        return modified(stored.path)

    def run(self) -> str:
        """The name of the job that stores here, "" where nothing says it.

        Raises: SnapshotError, the file of it cannot be read.
        """
        return _C.run_of_folder(os.fsencode(self.path))

    def open(self, stored: Stored, rank):
        """The bytes of one of its ranks. Raises: SnapshotError, they cannot be read."""
        return self.core.open(stored.step, stored.sequence, stored.path, rank)

    def read(self, stored: Stored):
        """Its index. Raises: SnapshotError, it cannot be read; names the file."""
        return self.core.read(stored.step, stored.sequence, stored.path)

    def choose(self, step: int | None) -> Stored:
        """The newest, or the newest of a step. Raises: SnapshotError, there is none."""
        snapshots = self.snapshots()
        if not snapshots:
            self._refuse_empty()
        found = [each for each in snapshots if step is None or each.step == step]
        if not found:
            steps = [str(each.step) for each in snapshots[:8]]
            raise SnapshotError(
                f"{shown_path(self.path)} has no snapshot of step {step}. Hint: it has "
                f"{', '.join(steps)}{' and others' if len(snapshots) > 8 else ''}."
            )
        return found[0]

    def index_of_its_own(self) -> dict[str, Any] | None:
        """An index.json of snapshots in the folder itself: save_snapshot's of before, or one."""
        path = self.path / _INDEX
        try:
            if path.stat().st_size > _MAX_INDEX_BYTES:
                return None
            index = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        is_ours = isinstance(index, dict) and index.get("format") == _FORMAT
        return index if is_ours and type(index.get("version")) is int else None

    def _refuse_empty(self) -> None:
        index = self.index_of_its_own()
        where = shown_path(self.path)
        if index is not None and index["version"] == 1:
            raise SnapshotError(
                f"{where} has a snapshot in save_snapshot's earlier format, which has no "
                "checksums. Hint: load_snapshot loads it, libddp consolidate makes one file of it."
            )
        if index is not None:
            raise SnapshotError(
                f"{where} is one snapshot. Hint: pass the folder that it is in, and --step."
            )
        raise SnapshotError(
            f"{where} has no snapshot that is whole. Hint: save with storage=True, or store what "
            "is in memory: libddp snapshot persist."
        )


def modified(path: bytes) -> float | None:
    """When the index of a snapshot was written; seconds since 1970."""
    try:
        return os.stat(os.path.join(path, os.fsencode(_INDEX))).st_mtime
    except OSError:
        return None


def _part(step: int, sequence: int, start: str, path: bytes) -> Part:
    ranks, world_size, size = [], 0, 0
    try:
        files = [entry.name for entry in os.scandir(os.fsdecode(path))]
    except FileNotFoundError:  # it has got its name, or is gone
        files = []
    for name in files:
        if stored := _STORED_RANK.fullmatch(name):
            ranks.append(int(stored[1]))
        elif file := _RANK_FILE.fullmatch(name):
            world_size = int(file[1])
            try:
                size += os.stat(os.path.join(os.fsdecode(path), name)).st_size
            except FileNotFoundError:
                continue
    return Part(step, sequence, start, path, sorted(ranks), world_size, size)
