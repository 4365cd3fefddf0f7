"""The fenced snippets of a documentation page, and what a comment before a fence says of one.

    for snippet in snippets.of("docs/ddp.md", "python"): ...

A snippet runs as printed, on two ranks, unless an HTML comment stands right before its fence:

    <!-- test: WORDS
    code that stands before the snippet
    -->

Words: `continued` (in the namespace of the page's snippet before), `alone` (one process, no
launcher), `rank-0` (the other ranks pass it over), `run` (a shell snippet, which is only read
otherwise), `not run: REASON`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_WORDS = {"continued", "alone", "rank-0", "run"}
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_COMMENT = re.compile(r"<!-- test:([^\n]*?)(?: -->|\n(.*?)-->)\n\s*\Z", re.S)


@dataclass(frozen=True)
class Snippet:
    page: str
    #: Of its first line in the page.
    line: int
    text: str
    words: frozenset[str] = frozenset()
    before: str = ""
    #: Why it does not run.
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def numbered(self) -> str:
        """Its text where it is in the page, so that a traceback names that line."""
        return "\n" * (self.line - 1) + self.text


def of(page: str, *languages: str) -> list[Snippet]:
    """Those of one page, in its order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        if fence[1] in languages:
            line = text.count("\n", 0, fence.start()) + 2
            found.append(_snippet(page, line, fence[2], text[: fence.start()]))
    return found


def _snippet(page: str, line: int, text: str, above: str) -> Snippet:
    start = above.rfind("<!-- test:")
    comment = _COMMENT.match(above, start) if start >= 0 else None
    if comment is None:
        return Snippet(page, line, text)
    said, before = comment[1].strip(), comment[2] or ""
    if said.startswith("not run: "):
        return Snippet(page, line, text, reason=said.removeprefix("not run: "))
    words = frozenset(said.replace(",", " ").split())
    if not words <= _WORDS:
        raise ValueError(f"{page}:{line}: 'test: {said}' is none of {sorted(_WORDS)}")
    return Snippet(page, line, text, words, before)


def with_snippets(*languages: str) -> list[str]:
    return [page for page in PAGES if of(page, *languages)]
