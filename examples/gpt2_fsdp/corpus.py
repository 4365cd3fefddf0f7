"""A corpus as a stream of pieces of text, from a folder, a file, an fsspec URL or the library.

    source = open_source("books/", (".txt",), 0)
    for piece in source.pieces():
        piece.text, piece.size_bytes, piece.last       # last: the file ends here

A piece ends only before white space that follows a letter or sign, and there GPT-2's pattern ends a
word too: the tokens of the pieces are exactly those of the whole text. (White space without end
makes a piece as long as it is.)
"""

import codecs
import hashlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from shared import UserError, standard_library

#: The last place where a word ends: everything from there on waits for the next piece.
LAST_END = re.compile(r"\S(?=\s+\S*\Z)")
MOST_BYTES, LEAST_BYTES = 2**20, 2**12


class Piece(NamedTuple):
    text: str
    size_bytes: int
    last: bool


@dataclass
class Source:
    """Files by name, each with a function that opens it."""

    name: str
    size_bytes: int
    files: list[tuple[str, Callable[[], BinaryIO]]]

    def pieces(self) -> Iterator[Piece]:
        """All files' text. Raises: UserError, naming file and offset, if it is not UTF-8."""
        # Small corpora are read in small pieces, so that a share of them can be held back.
        size = min(MOST_BYTES, max(LEAST_BYTES, self.size_bytes // 64))
        for name, opened in self.files:
            try:
                with opened() as file:
                    yield from _pieces(name, file, size)
            except OSError as error:
                raise UserError(f"{name}: cannot read it: {error.strerror or error}") from error


def _pieces(name: str, file: BinaryIO, size: int) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, offset = "", 0
    while block := file.read(size):
        rest += _decode(decoder, block, name, offset)
        offset += len(block)
        end = LAST_END.search(rest, max(0, len(rest) - size))
        if end:
            yield _piece(rest[: end.end()], last=False)
            rest = rest[end.end() :]
    rest += _decode(decoder, b"", name, offset, final=True)
    yield _piece(rest, last=True)


def _piece(text: str, last: bool) -> Piece:
    return Piece(text, len(text.encode("utf-8")), last)


def _decode(decoder, block: bytes, name: str, offset: int, final: bool = False) -> str:
    if b"\0" in block:
        raise UserError(f"{name}: this is a binary file; plain UTF-8 text is needed")
    waiting = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        place = offset - waiting + error.start
        raise UserError(f"{name}: not UTF-8 text (at offset {place})") from error


def open_source(source: str, suffixes: tuple[str, ...], limit_bytes: int) -> Source:
    """What `source` names; empty: Python's standard library. Raises: UserError."""
    if not source:
        text = standard_library(limit_bytes).encode()
        return Source(
            "Python's standard library", len(text), [("stdlib", lambda: io.BytesIO(text))]
        )
    import fsspec

    try:
        filesystem, place = fsspec.core.url_to_fs(source)
        sizes = _sizes(filesystem, place, suffixes)
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--source={source}: cannot read it: {reason}") from error
    sizes = {path: size for path, size in sizes.items() if size}
    if not sizes:
        wanted = f" that end in {', '.join(suffixes)}" if suffixes else ""
        raise UserError(
            f"--source={source}: no files{wanted} with anything in them; see --suffixes"
        )
    # Any part of the corpus, so also the part held back, is a fair mixture of the files.
    names = sorted(sizes, key=lambda path: hashlib.sha256(_below(path, place)).digest())
    files = [(name, lambda name=name: filesystem.open(name, "rb")) for name in names]
    return Source(source, sum(sizes.values()), files)


def _below(path: str, folder: str) -> bytes:
    return path.removeprefix(folder).lstrip("/").encode()


def _sizes(filesystem, place: str, suffixes: tuple[str, ...]) -> dict[str, int]:
    if filesystem.isfile(place):
        return {place: filesystem.size(place)}
    if not filesystem.exists(place):
        raise FileNotFoundError(2, "No such file or directory")
    found = filesystem.find(place, detail=True)
    return {
        path: entry["size"]
        for path, entry in found.items()
        if not suffixes or path.endswith(tuple(suffixes))
    }
