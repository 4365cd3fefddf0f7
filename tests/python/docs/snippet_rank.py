"""Runs the Python snippets of a page, one after the other, in one process of as many as there are.

    libddp run --nproc-per-node=2 snippet_rank.py docs/ddp.md     # all but those that are `alone`
    python snippet_rank.py docs/ddp.md                            # those that are

A snippet that begins anew gets an empty namespace; the group that the one before has left is ended.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests/python/support"), str(ROOT / "examples/nanogpt")]


def main(page: str) -> None:
    import snippets

    rank = os.environ.get("RANK")
    namespace: dict = {}
    for snippet in snippets.of(page, "python"):
        if snippet.reason or ("alone" in snippet.words) != (rank is None):
            continue
        if "continued" not in snippet.words:
            end_group()
            namespace = {"__name__": "__main__"}
        if "rank-0" not in snippet.words or rank in ("0", None):
            # The page's own name: tracebacks and libddp's errors show the line in it.
            exec(compile(snippet.before, f"{page} (before line {snippet.line})", "exec"), namespace)
            exec(compile(snippet.numbered, page, "exec"), namespace)
        os.write(1, f"ran {snippet.place}\n".encode())  # in one piece, beside the other rank's
    end_group()


def end_group() -> None:
    """Nothing of libddp is imported here that a snippet has not imported."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
