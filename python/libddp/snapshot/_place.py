"""Where snapshots are stored: a folder, or an address that fsspec reaches.

place = of("s3://bucket/run")
place.objects.list()
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from libddp._objects import ObjectError, Objects
from libddp.errors import ArgumentError

#: Of what a keeper takes in one message (libddp/keeper/keeper_message.h).
_MAX_ENVIRONMENT_BYTES = 512 << 10


@dataclass(frozen=True)
class Place:
    """What the core is told."""

    #: Or the address.
    folder: str
    #: What this process loads from; None: the folder.
    objects: Objects | None = None
    #: How the keeper starts what stores there, and the variables that it has.
    helper: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)


def of(folder: str | os.PathLike | None) -> Place:
    """Raises: ArgumentError, nothing can be stored there; says why."""
    if folder is None:
        return Place("")
    path = local(folder)
    if not path:
        raise ArgumentError("libddp snapshot: the folder is ''. Hint: None is memory only.")
    if "://" not in path:
        return Place(path)
    objects = objects_at(path)
    return Place(objects.address, objects, [sys.executable, "-m", "libddp._upload"], _environment())


def local(folder: str | os.PathLike) -> str:
    """A folder's path, or the address as it is."""
    path = os.fspath(folder)
    for ahead in ("file://", "local://"):
        path = path.removeprefix(ahead)
    return path


def objects_at(address: str) -> Objects:
    """Raises: ArgumentError, this machine cannot reach such addresses; says why."""
    try:
        return Objects(address)
    except ObjectError as error:
        raise ArgumentError(str(error)) from error


def _environment() -> list[str]:
    """What this process has: credentials may stand there, and the way to the modules does."""
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # The helper is no process of the job: nothing of libddp's begins with it.
    variables.pop("LIBDDP_DROP_IN", None)
    found = [f"{name}={value}" for name, value in variables.items()]
    # What is no text cannot be sent, and no file system asks for it.
    found = [each for each in found if _is_text(each)]
    if sum(map(len, found)) > _MAX_ENVIRONMENT_BYTES:
        raise ArgumentError(
            "libddp snapshot: the environment has more than 512 KiB, which are to be passed on to "
            "what stores at the address. Hint: start the job with fewer variables."
        )
    return found


def _is_text(each: str) -> bool:
    try:
        each.encode()
    except UnicodeEncodeError:
        return False
    return True
