"""libddp snapshot persist: what memory has newest, into the folder."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from libddp._snapshot_command._address import open_folder
from libddp._snapshot_command._keeper import connect, refuse_nameless, refuse_none, run_of
from libddp._snapshot_command._text import listed, shown_path
from libddp.errors import NetworkError, SnapshotError, TimeoutError

_ELSEWHERE = "run the same command on the other hosts"


def run(chosen: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    folder = open_folder(chosen.folder)
    name = run_of(folder, chosen.run)
    if not name:
        raise refuse_nameless(folder)
    keeper = connect(name)
    if keeper is None:
        raise refuse_none(name)
    began = time.monotonic()
    told = json.loads(keeper.store_newest(chosen.timeout))
    what = f"step {told['step']} (save {told['sequence']})"
    for rank in told["ranks"]:
        left = max(0.0, chosen.timeout - (time.monotonic() - began))
        try:
            keeper.wait(rank, told["sequence"], left)
        except TimeoutError as error:
            raise _late(chosen.timeout, what, told) from error
        except NetworkError as error:
            raise SnapshotError(
                f"the keeper of run '{name}' has ended before {what} was stored. Hint: libddp "
                "snapshot ls says what the folder has."
            ) from error
    _print(what, told)
    return 0


def _print(what: str, told: dict[str, Any]) -> None:
    folder = open_folder(told["folder"])
    whole = [each for each in folder.snapshots() if each.sequence == told["sequence"]]
    if whole:
        print(f"{shown_path(whole[0].path)}: {what} of {told['world_size']} ranks is stored")
        return
    print(
        f"{shown_path(folder.path)}: the parts of ranks {listed(told['ranks'])} of {what} are "
        f"stored; it is whole when those of all {told['world_size']} ranks are: {_ELSEWHERE}"
    )


def _late(timeout: float, what: str, told: dict[str, Any]) -> SnapshotError:
    hint = "the keeper goes on with it; libddp snapshot ls says how far it is"
    if len(told["ranks"]) < told["world_size"]:
        hint = f"it waits for {told['world_size'] - len(told['ranks'])} other ranks: {_ELSEWHERE}"
    return SnapshotError(f"{what} was not stored within {timeout:g} s. Hint: {hint}.")
