"""What the keeper starts to store at an address: frames on standard input, an answer to each.

    python -m libddp._upload

The keeper has the bytes (libddp/keeper/helper_objects.h); this brings them to fsspec's file system.
It is a process of the keeper's, so it goes on when the job's own processes die, and ends with it.
A frame is the word "lddp", the number of bytes and that of descriptors (none), then the bytes. A
request is JSON; an answer begins with "+", or with "-" ahead of what went wrong.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

from libddp._objects import ObjectError, Objects, Writer

_HEAD, _MAGIC = struct.Struct("=III"), 0x7064646C


def main() -> int:
    """Until the other end is closed; returns the exit status."""
    other = socket.socket(fileno=os.dup(0))
    # Whatever a library reads or prints is not for the keeper.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    server = _Server(other)
    try:
        while (request := _receive(other)) is not None:
            _send(other, server.answer(json.loads(request)))
    except ConnectionError:
        pass
    server.end()
    return 0


class _Server:
    def __init__(self, other: socket.socket) -> None:
        self._other = other
        self._objects: Objects | None = None
        self._file: Writer | None = None

    def answer(self, request: dict) -> bytes:
        call = request["call"]
        # Before anything can fail: it is on its way in any case.
        payload = _receive(self._other) if call in ("append", "create") else None
        try:
            return b"+" + (self._run(call, request, payload) or b"")
        except ObjectError as error:
            self.end()
            return b"-" + str(error).encode(errors="replace")
        except Exception as error:
            self.end()
            return b"-" + (
                f"libddp snapshot: {request.get('name', call)}: {type(error).__name__}: {error}. "
                "Hint: look at the storage service."
            ).encode(errors="replace")

    def end(self) -> None:
        """What is being written is not finished."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _run(self, call: str, request: dict, payload: bytes | None) -> bytes | None:
        if call == "start":
            self._objects = Objects(request["address"])
            return None
        objects, name = self._objects, request.get("name", "")
        if objects is None:
            raise ObjectError("libddp snapshot: the helper has no address.")
        if call == "list":
            return json.dumps(objects.list()).encode()
        if call == "read":
            return objects.read(name, request["offset"], request["bytes"])
        if call == "open":
            self._file = objects.writing(name, request["bytes"])
        elif call == "create":
            objects.create(name, payload)
        elif call == "remove":
            objects.remove(request["names"])
        elif call == "discard":
            self.end()
        elif self._file is None:
            raise ObjectError(f"libddp snapshot: {call} without an object that is open.")
        elif call == "append":
            self._file.append(payload)
        elif call == "close":
            file, self._file = self._file, None
            file.close()
        return None


def _receive(other: socket.socket) -> bytes | None:
    """One frame; None where the other end is closed."""
    head = _exactly(other, _HEAD.size)
    if head is None:
        return None
    magic, size, _ = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise ConnectionError("no frame")
    return _exactly(other, size)


def _exactly(other: socket.socket, size: int) -> bytes | None:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = other.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(found)


def _send(other: socket.socket, content: bytes) -> None:
    other.sendall(_HEAD.pack(_MAGIC, len(content), 0))
    other.sendall(content)


if __name__ == "__main__":
    sys.exit(main())
