"""Text -> train.bin, val.bin (one number per character) and meta.json.

    folder = prepare("", Path("out/data"), 4.0)                  # Python's own standard library
    folder = prepare("s3://bucket/book.txt", Path("out/data"), 0)  # your text, whole

train.py calls this itself; `python prepare.py --data=book.txt --data_dir=out/data` does it ahead.
Every process may call it at the same time: the first prepares, the others find the work done.
"""

import fcntl
import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from config import UserError, key, parse, run_script

FORMAT = 1
VAL_SHARE = 0.1  # the last tenth of the text is held back for validation
# Tests, printed manuals and character tables are half of the library and teach little.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LEFT_OUT |= {"pydoc_data", "encodings", "entities.py"}


@dataclass
class PrepareSettings:
    data: str = key("", "your text: a path or fsspec URL; empty: Python's own standard library")
    data_dir: str = key("out/nanogpt/data", "folder to write")
    corpus_mib: float = key(4.0, "size limit of the default corpus in MiB")


def prepare(source: str, folder: Path, corpus_mib: float) -> Path:
    """Write the files unless `folder` has them already; return `folder`. Raises: UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the kernel if we die
            origin = _origin(source, corpus_mib)
            if not _is_ready(folder, origin):
                _write(folder, origin, _read(source, corpus_mib))
    except OSError as error:
        raise UserError(f"cannot prepare data in {folder}: {error.strerror or error}") from error
    return folder


def standard_library(limit_bytes: int) -> str:
    """Printable ASCII of the standard library's sources, cut at `limit_bytes`.

    The files are ordered by a hash of their names: always the same order, and yet any part of the
    text, so also the held-back tenth, is a fair mixture of the whole.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = [path for path in paths if LEFT_OUT.isdisjoint(path.parts)]
    paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    keep = bytes([9, 10, *range(32, 127)])
    drop = bytes(set(range(256)) - set(keep))
    parts, size = [], 0
    for path in paths:
        part = (root / path).read_bytes().translate(None, drop)[: limit_bytes - size]
        parts.append(part)
        size += len(part)
        if size >= limit_bytes:
            break
    return b"".join(parts).decode("ascii")


def _read(source: str, corpus_mib: float) -> str:
    if not source:
        text = standard_library(int(corpus_mib * 2**20))
        if not text:
            raise UserError(
                f"no Python sources in {sysconfig.get_path('stdlib')} (or --corpus_mib is 0): "
                "give a text with --data=PATH"
            )
        return text
    try:
        content = _open_bytes(source)
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--data={source}: cannot read it: {reason}") from error
    if not content.strip():
        raise UserError(f"--data={source}: the file is empty")
    if b"\0" in content:
        raise UserError(f"--data={source}: this is a binary file; plain UTF-8 text is needed")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data={source}: not UTF-8 text (byte 0x{content[error.start]:02x} at offset "
            f"{error.start})"
        ) from error


def _open_bytes(source: str) -> bytes:
    if "://" not in source:
        return Path(source).read_bytes()
    import fsspec  # only URLs need it

    with fsspec.open(source, "rb") as file:
        return file.read()


def _origin(source: str, corpus_mib: float) -> dict:
    """What the files were made from; a change of it means that they must be made again."""
    if not source:
        return {"source": "python " + sys.version.split()[0], "state": f"{corpus_mib} MiB"}
    try:
        if "://" in source:
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(source)
            return {"source": source, "state": str(filesystem.ukey(path))}
        status = os.stat(source)
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--data={source}: cannot read it: {reason}") from error
    return {"source": os.path.abspath(source), "state": f"{status.st_size} {status.st_mtime_ns}"}


def _is_ready(folder: Path, origin: dict) -> bool:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return meta.get("format") == FORMAT and meta.get("origin") == origin


def _write(folder: Path, origin: dict, text: str) -> None:
    """Number the distinct characters of `text` in order and write both parts; meta.json is last."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    used = np.flatnonzero(np.bincount(codes))
    if len(used) > 2**16:
        raise UserError(f"{origin['source']}: {len(used)} distinct characters; 65536 are possible")
    dtype = np.uint8 if len(used) <= 2**8 else np.uint16
    number = np.zeros(used[-1] + 1, dtype=dtype)
    number[used] = np.arange(len(used))
    tokens = number[codes]
    split = len(tokens) - int(len(tokens) * VAL_SHARE)
    (folder / "meta.json").unlink(missing_ok=True)  # from here on the old files do not count
    tokens[:split].tofile(folder / "train.bin")
    tokens[split:].tofile(folder / "val.bin")
    chars = "".join(map(chr, used))
    meta = {"format": FORMAT, "origin": origin, "dtype": dtype.__name__, "chars": chars}
    meta |= {"train_tokens": split, "val_tokens": len(tokens) - split}
    fresh = folder / "meta.json.new"
    fresh.write_text(json.dumps(meta), encoding="utf-8")
    os.replace(fresh, folder / "meta.json")


def main(arguments: list[str]) -> int:
    settings = parse(PrepareSettings, arguments)
    folder = prepare(settings.data, Path(settings.data_dir), settings.corpus_mib)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    print(
        f"{folder}: {meta['train_tokens']} characters to train on, {meta['val_tokens']} held "
        f"back, {len(meta['chars'])} distinct"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "prepare.py"))
