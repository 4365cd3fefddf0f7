"""Checkpoints that survive a crash in the middle of writing.

    save(Path("out"), {"iter": 100, "model": model.state_dict()})
    state = load(Path("out"))          # the newest whole one, or None

A new checkpoint is written beside the old one, flushed to the disk and only then renamed to
`ckpt.pt`; the one before it stays as `ckpt.prev.pt`. At every moment one of the two is whole.
Files are read with weights_only=True: a checkpoint from elsewhere cannot run code.
"""

import contextlib
import os
import pickle
from pathlib import Path

import torch
from config import UserError

NAME = "ckpt.pt"
PREVIOUS = "ckpt.prev.pt"


def save(folder: Path, state: dict) -> Path:
    """Write `state` durably; return its path. Raises: UserError, and then nothing has changed."""
    path, fresh = folder / NAME, folder / (NAME + ".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(fresh, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.replace(path, folder / PREVIOUS)
        os.replace(fresh, path)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)  # a torn file is of no use and takes the space
        raise UserError(
            f"cannot write {path}: {_reason(error)}; {_what_is_left(folder)}"
        ) from error
    return path


def load(folder: Path, device="cpu") -> dict | None:
    """Return the newest state, or None if there is none. Raises: UserError if it is damaged."""
    path = folder / NAME
    if not path.exists():  # stopped between the two renames of save()
        path = folder / PREVIOUS
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        previous = folder / PREVIOUS
        hint = "--init_from=scratch starts anew"
        if path != previous and previous.exists():
            hint = f"'mv {previous} {path}' goes back to the one before"
        raise UserError(f"cannot read {path}: {_reason(error)}; {hint}") from error


def sync_folder(folder: Path) -> None:
    """Make the renames themselves durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The system's own words if there are any: torch wraps them in errors about its file format."""
    cause = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return (str(error) or type(error).__name__).splitlines()[0]


def _what_is_left(folder: Path) -> str:
    for name in (NAME, PREVIOUS):
        if (folder / name).exists():
            return f"the previous checkpoint {folder / name} is intact"
    return "there is no earlier checkpoint"
