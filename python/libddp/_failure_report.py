"""What `libddp run` says when a rank fails: the rank that failed first, and what it died of.

The launcher's own look at exit codes cannot tell cause from effect: the rank that raised is often
still printing when another has already ended because of it. So `report` reads what the ranks of
this host have left (_last_words.py), and what a rank suffered from another one (PeerError) comes
after what started it. An error that all ranks met alike, or that is between ranks, is pinned on
none.
"""

from __future__ import annotations

import glob
import math
import os
import re
import sys
from dataclasses import replace

from libddp import _worker_ends
from libddp._last_words import MAX_TEXT, LastWords, read

_MAX_PLACES = 4


def report(failures, note: str = "") -> tuple[LastWords, int]:
    """Prints the screen on stderr; returns the rank that it names and the exit status it gives.

    Args:
        failures: torch's ProcessFailure by rank.
        note: one more line.
    """
    ends = ends_of(failures)
    first, of_rank, status = ends[0], "", exit_status(ends[0], failures)
    lines = _cause(ends)
    if not (first.is_nobodys or _are_alike(ends)):
        code = failures[first.rank].exitcode if first.rank in failures else 1
        of_rank = f"of rank {first.rank}: {code}; "
    lines += [f"  {note}"] if note else []
    lines += [f"  logs: {_logs(first, failures)}", f"  exit code {of_rank}of libddp run: {status}"]
    print("libddp run: failed;", "\n".join(lines), file=sys.stderr, flush=True)
    return first, status


def tell_restart(ends: list[LastWords], number: int, limit: int) -> None:
    """Prints on stderr why the workers are started again.

    Args:
        ends: as `ends_of` gives them.
        number: of restarts, with this one.
        limit: --max-restarts.
    """
    text = "\n".join(_cause([replace(end, text=_first_line(end.text)) for end in ends]))
    print(f"libddp run: restart {number} of {limit};", text, file=sys.stderr, flush=True)


def ends_of(failures) -> list[LastWords]:
    """How the ranks of this host ended, the one that started it first."""
    return sorted(_collect(failures), key=lambda end: (end.follows, end.when))


def exit_status(first: LastWords, failures) -> int:
    """What a shell would show of that rank's worker: its exit code, or 128 + its signal.

    A worker that was stopped while it told of its exception would have ended with 1.
    """
    failure = failures.get(first.rank)
    if failure is None and first.path:  # a rank that a worker started
        folder = os.path.dirname(first.path)
        own = [f for f in failures.values() if os.path.dirname(f.error_file) == folder]
        failure = own[0] if own else None
    if failure is None:
        return 1
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _cause(ends: list[LastWords]) -> list[str]:
    """Who was first, of what, where, and who followed."""
    first = ends[0]
    if first.is_nobodys:
        return _between(ends)
    if _are_alike(ends):
        return [f"alike on {_named(ends)}: {_without_rank(first.text)}", *_at(first.place)]
    lines = [f"rank {first.rank} was first: {first.text}", *_at(first.place)]
    return [*lines, f"  then: {_named(ends[1:])}"] if len(ends) > 1 else lines


def _are_alike(ends: list[LastWords]) -> bool:
    return len(ends) > 1 and len({(_without_rank(end.text), end.place) for end in ends}) == 1


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _between(ends: list[LastWords]) -> list[str]:
    """The cause, which each of them tells after its own call, and where each of them was."""
    _, _, text = ends[0].text.partition("] ")
    _, _, cause = text.partition(": ")
    places = [f"{end.place} (rank {end.rank})" for end in ends if end.place]
    lines = [f"between ranks: {cause or ends[0].text}"]
    return lines + [line for place in places[:_MAX_PLACES] for line in _at(place)]


def _at(place: str) -> list[str]:
    return [f"  at:   {place}"] if place else []


def _named(ends: list[LastWords]) -> str:
    ranks = sorted(end.rank for end in ends)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _without_rank(text: str) -> str:
    """An error's text without the rank that says it."""
    return re.sub(r", rank \d+/\d+\]", "]", text)


def _collect(failures) -> list[LastWords]:
    ends = {}
    for failure in failures.values():
        folder = os.path.dirname(os.path.dirname(failure.error_file))
        if not folder:
            continue  # torch's "<N/A>"
        for path in glob.glob(os.path.join(glob.escape(folder), "*", "error.json")):
            end = read(path)
            if end is not None:
                ends[end.rank] = end
    for rank, failure in failures.items():
        if rank not in ends:
            text = failure.message
            if isinstance(text, dict):
                text = text.get("message", "")
            when = -math.inf if failure.exitcode < 0 else math.inf
            ends[rank] = LastWords(rank, str(text)[:MAX_TEXT], "", when, False)
    return _worker_ends.complete(list(ends.values()), failures)


def _logs(first: LastWords, failures) -> str:
    """Where the output of the ranks went."""
    failure = failures.get(first.rank)
    folder = os.path.dirname(first.path or (failure.error_file if failure else ""))
    kept = [os.path.join(folder, name) for name in ("stderr.log", "stdout.log")]
    found = [path for path in kept if folder and os.path.isfile(path) and os.path.getsize(path)]
    return ", ".join(found) or "above (Hint: --log-dir=logs --redirects=3 keeps one per rank)"
