"""Checkpoints that survive a crash in the middle of writing, and what else a long run needs.

    with claim(Path("out")), StopSignal() as stop:      # no second run there; Ctrl-C and SIGTERM
        state = load(Path("out"))                       # the newest whole one, or None
        while not stop.signum:
            step()
        save(Path("out"), {"iter": 100, "model": model.state_dict()})

A new checkpoint is written beside the old one, flushed to the disk and only then renamed to
`ckpt.pt`; the one before it stays as `ckpt.prev.pt`. At every moment one of the two is whole.
Files are read with weights_only=True: a checkpoint from elsewhere cannot run code.
"""

import contextlib
import fcntl
import os
import pickle
import signal
import time
from pathlib import Path
from typing import IO

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


def check_same(state: dict, shape: dict, chars: str, folder: Path) -> None:
    """Raises: UserError if the checkpoint is not one of this network and text."""
    where, hint = f"the checkpoint in {folder}", "use --init_from=scratch or another --out_dir"
    for name, wanted in shape.items():
        had = state["model_config"][name]
        if had != wanted:
            raise UserError(f"{where} has {name}={had}, not {wanted}; {hint}")
    if state["chars"] != chars:
        raise UserError(f"{where} was trained on a text with other characters; {hint}")


def claim(folder: Path) -> IO:
    """Keep a second run out of `folder` until the result is closed or we die. Raises: UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        hint = "wait for it, end it, or use another --out_dir"
        raise UserError(f"another run is training in {folder}; {hint}") from error
    return lock


class StopSignal:
    """Ctrl-C and SIGTERM end the training between two iterations instead of in the middle of one.

    It remembers the first signal. Thread rule: main thread (as Python's signal module asks).
    """

    PATIENCE_SECONDS = 2.0

    def __init__(self):
        self.signum = 0
        self.alone = False  # set when the other ranks have left before us
        self._since = 0.0
        self._old = {}

    def __enter__(self) -> "StopSignal":
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame) -> None:
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
        # One Ctrl-C may arrive twice, from the terminal and from the launcher. A much later one is
        # a user who has lost patience.
        elif signum == signal.SIGINT and time.monotonic() - self._since > self.PATIENCE_SECONDS:
            raise KeyboardInterrupt

    def name(self) -> str:
        return signal.Signals(self.signum).name
