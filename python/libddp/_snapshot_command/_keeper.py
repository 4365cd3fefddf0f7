"""The keeper of a job on this host."""

from __future__ import annotations

from libddp._load import load
from libddp._snapshot_command._folder import Folder
from libddp._snapshot_command._text import shown_path
from libddp.errors import NetworkError, SnapshotError, TimeoutError

_C = load()
#: It answers at once; the machine may be short of CPU time.
_PATIENCE = 10.0


def run_of(folder: Folder | None, name: str | None) -> str:
    """The name of the job; "" where nothing says it.

    Raises:
        ArgumentError: `name` is none.
        SnapshotError: the folder's file of it cannot be read.
    """
    if name is not None:
        _C.check_run_name(name)
        return name
    return "" if folder is None else folder.run()


def connect(run: str):
    """None where this host has no keeper of the job. Raises: SnapshotError, it does not answer."""
    try:
        return _C.KeeperClient(run, _PATIENCE)
    except NetworkError:
        return None
    except TimeoutError as error:
        raise SnapshotError(
            f"the keeper of run '{run}' does not answer. Hint: look at the state of the process "
            "libddp-keeper."
        ) from error


def refuse_none(run: str) -> SnapshotError:
    """What to raise where there must be one."""
    return SnapshotError(
        f"this host has no keeper of run '{run}'. Hint: it is there while the job runs, and for "
        "its `linger` seconds; use the host and the user of the job."
    )


def refuse_nameless(folder: Folder) -> SnapshotError:
    """The same where nothing says which job it is."""
    return SnapshotError(
        f"{shown_path(folder.path)} does not say which job stores there. Hint: no save was made "
        "with it yet, or the Snapshot has run=...: pass that as --run."
    )
