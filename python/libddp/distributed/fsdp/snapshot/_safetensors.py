"""The safetensors format, written and read tensor by tensor.

    with Writer(path, {"weight": (torch.float32, [3, 2])}) as file:
        file.write("weight", tensor)           # in the order of the names
    Reader(path).read("weight", 0, 4)          # elements [0, 4)

The package of that name takes all tensors of a file at once, which is more than a rank may have the
memory for; its files and these are the same. A file is 8 bytes (length of the header), the header
(JSON: name -> dtype, shape, [begin, end) of its bytes) and the bytes. It appears under its name
when it is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from libddp.errors import SnapshotError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """Raises: SnapshotError, the format has no such type."""
    if dtype not in _NAMES:
        raise SnapshotError(
            f"libddp: {dtype} cannot be written as safetensors. Hint: leave that tensor out."
        )
    return _NAMES[dtype]


_HINTS = {
    (errno.ENOSPC, errno.EDQUOT): "make room there; what was there before is whole.",
    (errno.EACCES, errno.EPERM, errno.EROFS): "choose a path that this user may write to.",
    (errno.ENOTDIR, errno.EEXIST): "a file stands where a folder must be; choose another path.",
    (errno.EISDIR,): "a folder stands where the file must be; choose another path.",
    (errno.ENOENT,): "choose a path whose folder is there.",
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what the system may refuse. Raises: SnapshotError, names `path` and the reason."""
    try:
        yield
    except OSError as error:
        hint = next((h for numbers, h in _HINTS.items() if error.errno in numbers), None)
        at = f" ({error.filename})" if error.filename not in (None, str(path), path) else ""
        raise SnapshotError(
            f"libddp: cannot write {path}: {error.strerror or error}{at}. "
            f"Hint: {hint or 'look at that disk, or choose another path.'}"
        ) from error


def sync_folder(folder: Path) -> None:
    """Makes renames in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer:
    """Writes one file; thread rule: one thread.

    Attributes:
        offsets: name -> where its bytes begin in the file.
        size: of the whole file, in bytes.

    Raises:
        SnapshotError: the system refuses; names the file. Nothing is left of what was written.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": name_of(dtype),
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        self._head = text + b" " * (-len(text) % 8)
        first = 8 + len(self._head)
        del header["__metadata__"]
        self.offsets = {name: first + entry["data_offsets"][0] for name, entry in header.items()}
        self.size = first + end
        self._path, self._fresh = path, path.with_name(path.name + ".tmp")

    def __enter__(self) -> Writer:
        with writing(self._path):
            self._file = open(self._fresh, "wb")
            try:
                self._file.write(len(self._head).to_bytes(8, "little") + self._head)
            except OSError:
                self._discard()
                raise
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The bytes of `name`, which is the next one."""
        if self._file.tell() != self.offsets[name]:
            raise SnapshotError(
                f"libddp: {name!r} does not begin at byte {self._file.tell()} of {self._path}. "
                "Hint: write all tensors in their order, with the shapes that were announced."
            )
        data = _bytes(tensor.detach().cpu().contiguous()).numpy()
        with writing(self._path):
            self._file.write(data)

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None and self._file.tell() == self.size:
                self._publish()
        finally:
            self._discard()

    def _publish(self) -> None:
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._fresh, self._path)
            sync_folder(self._path.parent)

    def _discard(self) -> None:
        """What has no name yet; an error of that would hide the one that led here."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._fresh.unlink(missing_ok=True)


class Reader:
    """Reads one file.

    Raises:
        SnapshotError: it is missing, truncated or no such file; names it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.size = path.stat().st_size
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > self.size:
                    raise ValueError(f"a header of {length} bytes")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries: dict[str, dict] = header
            ends = [entry["data_offsets"][1] for entry in header.values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SnapshotError(
                f"libddp: cannot read {path}: {error}. Hint: it is missing, or no safetensors file."
            ) from error
        self._first = 8 + length
        if self._first + max(ends, default=0) != self.size:
            raise SnapshotError(
                f"libddp: {path} has {self.size} bytes, its header says "
                f"{self._first + max(ends, default=0)}. Hint: it was truncated; take another copy."
            )

    def offset(self, name: str) -> int:
        """Where the bytes of a tensor begin in the file."""
        return self._first + self.entries[name]["data_offsets"][0]

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.entries[name]["dtype"]]

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a tensor, in one dimension."""
        dtype = self.dtype(name)
        found = torch.empty(end - begin, dtype=dtype, device="cpu")
        with open(self._path, "rb") as file:
            file.seek(self.offset(name) + begin * dtype.itemsize)
            count = file.readinto(_bytes(found).numpy()) if end > begin else 0
        if count != (end - begin) * dtype.itemsize:
            raise SnapshotError(
                f"libddp: {self._path} ends inside of {name!r}. Hint: take another copy."
            )
        return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
