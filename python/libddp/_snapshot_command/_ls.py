"""libddp snapshot ls: snapshots in a folder, and in the memory of this host's keeper."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from libddp._snapshot_command._address import open_folder
from libddp._snapshot_command._folder import REMOVED, Folder, Stored, modified
from libddp._snapshot_command._keeper import connect, refuse_none, run_of
from libddp._snapshot_command._text import listed, shown, shown_path, table, when
from libddp.errors import SnapshotError
from libddp.plan.sizes import show_bytes


def run(chosen: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    folder = None if chosen.folder is None else open_folder(chosen.folder)
    found = _look(folder)
    try:
        found["run"] = run_of(folder, chosen.run) or None
        keeper = connect(found["run"]) if found["run"] else None
        found["keeper"] = json.loads(keeper.status()) if keeper else None
        if keeper is None and folder is None:
            raise refuse_none(chosen.run)
    except SnapshotError as error:
        found["errors"].append(str(error))
    if chosen.json:
        print(json.dumps(found))
    else:
        _print(found)
        for error in found["errors"]:
            print(f"libddp snapshot ls: {error}", file=sys.stderr)
    return 1 if found["errors"] else 0


def _look(folder: Folder | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "folder": None,
        "snapshots": [],
        "unfinished": [],
        "save_snapshot": None,
        "run": None,
        "keeper": None,
        "errors": [],
    }
    if folder is None:
        return found
    found["folder"] = shown_path(folder.path)
    for stored in folder.snapshots():
        entry = _entry(folder, stored)
        found["snapshots"].append(entry)
        if entry["error"]:
            found["errors"].append(entry["error"])
    for part in folder.unfinished():
        found["unfinished"].append(
            {
                "step": part.step,
                "save": part.sequence,
                "start": part.start,
                "bytes": part.bytes,
                "stored_ranks": part.stored_ranks,
                "world_size": part.world_size,
                "is_being_removed": part.start == REMOVED,
                "path": shown_path(part.path),
            }
        )
    index = folder.index_of_its_own()
    if index is not None and index["version"] == 1:
        files = index.get("files")
        sizes = list(files.values()) if isinstance(files, dict) else []
        found["save_snapshot"] = {
            "bytes": sum(size for size in sizes if type(size) is int),
            "world_size": index.get("world_size") if type(index.get("world_size")) is int else 0,
            "time": modified(os.fsencode(folder.path)),
        }
    return found


def _entry(folder: Folder, stored: Stored) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "step": stored.step,
        "save": stored.sequence,
        "bytes": None,
        "ranks": None,
        "time": folder.modified(stored),
        "path": shown_path(stored.path),
        "error": None,
    }
    try:
        index = folder.read(stored)
        entry["bytes"] = sum(rank.bytes for rank in index.ranks)
        entry["ranks"] = index.world_size
    except SnapshotError as error:
        entry["error"] = str(error)
    return entry


def _print(found: dict[str, Any]) -> None:
    if found["folder"] is not None:
        _print_folder(found)
    if found["keeper"] is not None:
        _print_keeper(found["keeper"])
    elif found["run"]:
        print(f"memory: this host has no keeper of run {found['run']}")


def _print_folder(found: dict[str, Any]) -> None:
    snapshots = found["snapshots"]
    total = sum(entry["bytes"] or 0 for entry in snapshots)
    count = "1 snapshot" if len(snapshots) == 1 else f"{len(snapshots)} snapshots"
    print(f"{found['folder']}: {count}, {show_bytes(total)}" if snapshots else _none(found))
    if snapshots:
        rows = [["step", "save", "size", "ranks", "stored"]]
        for entry in snapshots:
            size = "damaged" if entry["error"] else show_bytes(entry["bytes"])
            ranks = "?" if entry["ranks"] is None else str(entry["ranks"])
            row = [str(entry["step"]), str(entry["save"]), size, ranks, when(entry["time"])]
            rows.append(row)
        print(table(rows))
    for part in found["unfinished"]:
        print("  " + _unfinished(part))
    old = found["save_snapshot"]
    if old is not None:
        print(
            "  index.json: a snapshot in save_snapshot's earlier format, "
            f"{show_bytes(old['bytes'])}, {old['world_size']} ranks, {when(old['time'])}"
        )


def _none(found: dict[str, Any]) -> str:
    return f"{found['folder']}: no snapshots of libddp.Snapshot"


def _unfinished(part: dict[str, Any]) -> str:
    name = f"step {part['step']} (save {part['save']})"
    if part["is_being_removed"]:
        return f"{name}: being removed"
    world = part["world_size"] or "?"
    return (
        f"{name}: unfinished, of start {shown(part['start'])}: {len(part['stored_ranks'])} of "
        f"{world} ranks stored, {show_bytes(part['bytes'])}"
    )


def _print_keeper(status: dict[str, Any]) -> None:
    workers = ", ".join(
        f"rank {each['rank']}: process {each['pid']}"
        for each in sorted(status["workers"], key=lambda each: each["rank"])
    )
    agent = f", agent {status['agent']}" if status["agent"] else ""
    print(
        f"memory: keeper of run {shown(status['run'])}, process {status['pid']}{agent}; "
        f"workers: {workers or 'none'}"
    )
    rows = [["rank", "of", "size", "saves in memory", "stored", "storing"]]
    for each in status["ranks"]:
        saves = [slot for slot in each["slots"] if "step" in slot]
        saves.sort(key=lambda slot: -slot["sequence"])
        row = [
            str(each["rank"]),
            str(each["world_size"]),
            show_bytes(each["bytes"]),
            ", ".join(_slot(slot) for slot in saves) or "none",
            _saved(each["stored"]) if each["stored"] else "-",
            "yes" if each["num_waiting"] else "-",
        ]
        rows.append(row)
    if len(rows) > 1:
        print(table(rows))
    for error, ranks in _errors(status).items():
        print(f"  not stored, ranks {listed(ranks)}: {shown(error)}")


def _errors(status: dict[str, Any]) -> dict[str, list[int]]:
    errors: dict[str, list[int]] = {}
    for each in status["ranks"]:
        if each["error"] and each["rank"] not in errors.get(each["error"], []):
            errors.setdefault(each["error"], []).append(each["rank"])
    return errors


def _slot(slot: dict[str, Any]) -> str:
    return _saved(slot) + (" being read" if slot["is_held"] else "")


def _saved(saved: dict[str, Any]) -> str:
    return f"step {saved['step']} (save {saved['sequence']})"
