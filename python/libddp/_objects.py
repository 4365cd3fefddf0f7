"""Objects under an address of fsspec's, as snapshots need them. It imports nothing of libddp's.

    objects = Objects("s3://bucket/run")
    with objects.writing("step-8.2/rank-0-of-1.4f2a.safetensors", size) as file:
        file.append(some_bytes)
    objects.read("step-8.2/index.json", 0, 100)

Errors are ObjectErrors that name the address, the reason and a hint. Retries and credentials are
the file system's. Thread rule: reading by any thread, one writer.
"""

from __future__ import annotations

import contextlib
import posixpath

#: What is sent at once of a large object, unless there would be more parts than services take.
_PART_BYTES, _MAX_PARTS = 16 << 20, 9_000
_HINTS = (
    (("credential", "accessdenied", "forbidden", "permission", "signature", "accesskey", "403"),
     "look at the credentials as fsspec's file system finds them (environment, its own files)"),
    (("nosuchbucket", "bucket does not exist", "not found", "no such file", "404"),
     "make the bucket, or correct the address"),
)  # fmt: skip


class ObjectError(Exception):
    """What could not be done, where, and why."""


class Objects:
    """Those whose names begin with an address.

    Raises:
        ObjectError: fsspec or the library of the protocol is not installed; the address has no
            file system, or one that other processes do not see.
    """

    def __init__(self, address: str) -> None:
        protocol = address.partition("://")[0]
        if protocol == "memory":
            raise ObjectError(
                f"libddp snapshot: {address} is the memory of this process, which no other one "
                "sees. Hint: Snapshot() without a folder keeps saves in memory that outlives "
                "the processes."
            )
        try:
            import fsspec
        except ImportError as error:
            raise ObjectError(
                f"libddp snapshot: {address} needs fsspec, which is not installed: {error}. Hint: "
                "pip install fsspec and the library of the protocol (s3fs, gcsfs, ocifs)."
            ) from error
        try:
            self._files, root = fsspec.core.url_to_fs(address.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ObjectError(
                f"libddp snapshot: {address}: no file system of fsspec's serves it: "
                f"{_told(error)}. Hint: install the library of the protocol (s3:// s3fs, gs:// "
                "gcsfs, oci:// ocifs)."
            ) from error
        except Exception as error:
            raise _refused(address, "opened", error) from error
        self.address, self._root = address.rstrip("/"), root.rstrip("/")

    def list(self) -> list[str]:
        """Names of all objects; none where the address is not there."""
        try:
            # Of listings: others have stored something since.
            self._files.invalidate_cache()
            found = self._files.find(self._root)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _refused(self.address, "listed", error) from error
        ahead = self._root + "/"
        return [path[len(ahead) :] for path in found if path.startswith(ahead)]

    def read(self, name: str, offset: int, size: int) -> bytes:
        """From `offset` on, `size` bytes of them or as many as there are."""
        try:
            return self._files.cat_file(self._path(name), start=offset, end=offset + size)
        except Exception as error:
            raise _refused(f"{self.address}/{name}", "read", error) from error

    def size(self, name: str) -> int:
        return self._told_of(name)["size"]

    def modified(self, name: str) -> float | None:
        """When it was written, in seconds since 1970, where the file system says it."""
        with contextlib.suppress(Exception):  # many do not
            return self._files.modified(self._path(name)).timestamp()
        return None

    def create(self, name: str, content: bytes) -> None:
        """Unless it is there. Of two at once one wins where the service can tell (S3, GCS)."""
        path = self._path(name)
        try:
            with contextlib.suppress(FileExistsError):
                self._files.pipe_file(path, content, mode="create")
        except Exception as error:
            # One that cannot tell says so in its own way.
            if self._is_there(path):
                return
            try:
                self._files.pipe_file(path, content)
            except Exception:
                raise _refused(f"{self.address}/{name}", "written", error) from error

    def remove(self, names: list[str]) -> None:
        """What is not there is no error."""
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._path(name))
        except Exception as error:
            raise _refused(f"{self.address}/{name}", "removed", error) from error

    def writing(self, name: str, size: int) -> Writer:
        """Of an object that comes in parts; `size`: about as many bytes."""
        part = max(_PART_BYTES, size // _MAX_PARTS + 1)
        return Writer(self._files, self._path(name), f"{self.address}/{name}", part)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def _is_there(self, path: str) -> bool:
        try:
            return self._files.exists(path)
        except Exception:  # what is wrong with writing it is the one to tell
            return False

    def _told_of(self, name: str) -> dict:
        try:
            return self._files.info(self._path(name))
        except Exception as error:
            raise _refused(f"{self.address}/{name}", "looked at", error) from error


class Writer:
    """An object that is there when close() has returned, and not before."""

    def __init__(self, files, path: str, address: str, part_bytes: int) -> None:
        self._address = address
        try:
            self._file = files.open(path, "wb", block_size=part_bytes)
        except Exception as error:
            raise _refused(address, "written", error) from error

    def append(self, content) -> None:
        try:
            self._file.write(content)
        except Exception as error:
            raise _refused(self._address, "written", error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except Exception as error:
            self.discard()
            raise _refused(self._address, "written", error) from error

    def discard(self) -> None:
        """Nothing of it will be there; what the service has of it is given up if it can be."""
        with contextlib.suppress(Exception):  # another error is being told
            self._file.discard()
        self._file.closed = True  # what is left of it must not finish it

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind, value, trace) -> None:
        self.close() if kind is None else self.discard()


def _refused(where: str, done: str, error: Exception) -> ObjectError:
    told = _told(error)
    hint = "look at the storage service and the way to it; the file system has tried again itself"
    folded = f"{type(error).__name__} {told}".lower()
    for words, better in _HINTS:
        if any(word in folded for word in words):
            hint = better
            break
    return ObjectError(f"libddp snapshot: {where} could not be {done}: {told}. Hint: {hint}.")


def _told(error: BaseException) -> str:
    """With the service's own words, which file systems put behind an error of their own."""
    texts = []
    current: BaseException | None = error
    while current is not None and len(texts) < 3:
        text = f"{type(current).__name__}: {current}".strip().rstrip(".")
        if text not in texts:
            texts.append(text)
        current = current.__cause__
    return "; from ".join(texts)
