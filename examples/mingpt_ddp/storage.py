"""Whole files at a path or an fsspec URL (s3://, memory://, ...): read, replace, try out.

    storage.replace("s3://bucket/run/snapshot.pt", data)
    data = storage.read("out/snapshot.pt")       # None if there is no such file

A replacement happens as a whole or not at all. A local file is written beside the old one, flushed
to the disk and renamed; object stores take a new object only when all of it has arrived.
"""

import contextlib
import os
import sys
from pathlib import Path

import fsspec
from errors import UserError, reason
from fsspec.implementations.local import LocalFileSystem


def read(path: str, what: str = "file") -> bytes | None:
    """Return the content, or None if nothing is there. Raises: UserError."""
    with _failures(f"cannot read the {what} {path}"):
        filesystem, place = fsspec.core.url_to_fs(path)
        try:
            return filesystem.cat_file(place)
        except FileNotFoundError:
            return None


def replace(path: str, data: bytes, what: str = "file") -> None:
    """Make `data` the content of `path`. Raises: UserError, and then the old content is there."""
    with _failures(f"cannot write the {what} {path}"):
        filesystem, place = fsspec.core.url_to_fs(path)
        if isinstance(filesystem, LocalFileSystem):
            _replace_local(Path(place), data)
        else:
            filesystem.pipe_file(place, data)


def try_out(path: str, what: str = "file") -> None:
    """Find out whether `path` can be written, without touching it. Raises: UserError."""
    with _failures(f"cannot write the {what} {path}"):
        filesystem, place = fsspec.core.url_to_fs(path)
        if isinstance(filesystem, LocalFileSystem) and filesystem.isdir(place):
            raise IsADirectoryError(21, "it is a folder")
    probe = path + ".probe"
    try:
        replace(probe, b"x", what)
    except UserError as error:
        raise UserError(str(error).replace(probe, path)) from error.__cause__
    with _failures(f"cannot remove {probe}, which was to show whether {path} can be written"):
        filesystem.rm_file(place + ".probe")


def _replace_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    try:
        with open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)  # a torn file is of no use and takes the space
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _failures(what: str):
    """Turns an error of the file system, local or remote, into a UserError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, ValueError, ImportError, *_aws_errors())):
            raise
        raise UserError(f"{what}: {reason(error)}. Hint: {_hint(error)}") from error


def _aws_errors() -> tuple:
    """Missing credentials and the like are no OSErrors; loaded only where s3:// was used."""
    module = sys.modules.get("botocore.exceptions")
    return (module.BotoCoreError, module.ClientError) if module else ()


def _hint(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "pip install the package that it names"
    if isinstance(error, ValueError):
        return "paths are written out/file, s3://bucket/file or memory://file"
    return "give another path, or check its folder or bucket, permissions, space and credentials"
