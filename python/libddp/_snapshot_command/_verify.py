"""libddp snapshot verify: every byte against its checksum."""

from __future__ import annotations

import argparse
import os
import sys
import time

from libddp._snapshot_command._address import open_folder
from libddp._snapshot_command._folder import Folder, Stored
from libddp._snapshot_command._pieces import lacks, tensors_of
from libddp._snapshot_command._text import shown_path
from libddp.errors import SnapshotError
from libddp.plan.sizes import show_bytes


def run(chosen: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    folder = open_folder(chosen.folder)
    newest = folder.choose(chosen.step)
    is_whole = True
    for stored in folder.snapshots() if chosen.all else [newest]:
        is_whole = _verify(folder, stored) and is_whole
    return 0 if is_whole else 1


def _verify(folder: Folder, stored: Stored) -> bool:
    began = time.perf_counter()
    damages, count, size = _damages(folder, stored)
    seconds = time.perf_counter() - began
    for damage in damages:
        print(f"libddp snapshot verify: {damage}", file=sys.stderr)
    result = "whole" if not damages else f"damaged ({len(damages)} found)"
    print(
        f"{stored.name}: {result}; {count} files, {show_bytes(size)}, "
        f"{size / 1e9 / max(seconds, 1e-9):.2f} GB/s"
    )
    return not damages


def _damages(folder: Folder, stored: Stored) -> tuple[list[str], int, int]:
    """What is wrong, files that were read, and their bytes."""
    try:
        index = folder.read(stored)
    except SnapshotError as error:
        return [str(error)], 0, 0
    threads = len(os.sched_getaffinity(0))
    found, files, size = [], {}, 0
    for rank in index.ranks:
        try:
            file = files[rank.rank] = folder.open(stored, rank)
            damages = file.damage(threads)
        except SnapshotError as error:
            found.append(str(error))
            continue
        size += rank.bytes
        for begin, end, where in damages:
            found.append(
                f"{shown_path(os.path.join(stored.path, os.fsencode(rank.file)))} is damaged: "
                f"bytes {begin} to {end} of its data have another checksum than when they were "
                f"stored ({where})."
            )
    if len(files) == len(index.ranks):
        lacking = [lacks(tensor) for tensor in tensors_of(files).values()]
        found += [f"{shown_path(stored.path)}: {text}." for text in lacking if text]
    return found, len(files), size
