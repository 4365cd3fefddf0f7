"""libddp overlap trace.json [--output overlap.png]: how much communication computation hides.

Reads what DistributedDataParallel.save_trace() wrote and prints a line per rank: milliseconds of
backward computation and of communication over all passes of the trace, the part of the
communication that lies inside this rank's backward, and its percentage. --output draws the last
passes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from libddp.errors import ArgumentError

Span = tuple[float, float]
_COLORS = {
    "forward": "#b0b0b0",
    "backward": "#4878a8",
    "hidden communication": "#55a868",
    "exposed communication": "#d65f5f",
}


@dataclass
class RankSpans:
    """What one rank did, as (begin, end) in microseconds."""

    forward: list[Span] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)
    communication: list[Span] = field(default_factory=list)

    def hidden(self) -> list[Span]:
        """The parts of the communication inside the backward."""
        return intersection(self.communication, self.backward)


def run(chosen: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    try:
        ranks = read(chosen.trace)
        for line in report(ranks):
            print(line)
        if chosen.output:
            draw(ranks, chosen.output, chosen.passes)
    except ArgumentError as error:
        print(f"libddp overlap: {error}", file=sys.stderr)
        return 1
    return 0


def read(path: Path) -> dict[int, RankSpans]:
    """The spans of each rank.

    Raises:
        ArgumentError: the file is not there, or is no trace of ours.
    """
    try:
        trace = json.loads(path.read_text())
        if trace["otherData"]["producer"] != "libddp":
            raise ValueError("another program wrote it")
        return _spans(trace["traceEvents"])
    except OSError as error:
        raise ArgumentError(f"cannot read {str(path)!r}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{str(path)!r} is no trace of libddp. Hint: write one with model.save_trace(path)."
        ) from error


def _spans(events: list[dict]) -> dict[int, RankSpans]:
    ranks: dict[int, RankSpans] = defaultdict(RankSpans)
    for event in events:
        if event["ph"] != "X":
            continue
        span = (event["ts"], event["ts"] + event["dur"])
        rank = ranks[event["pid"]]
        if event["cat"] == "communication":
            rank.communication.append(span)
        elif event["name"] in ("forward", "backward"):
            getattr(rank, event["name"]).append(span)
    if not ranks or not all(spans.backward for spans in ranks.values()):
        raise ValueError("a rank has no backward pass")
    return dict(sorted(ranks.items()))


def intersection(some: list[Span], others: list[Span]) -> list[Span]:
    """Where both are; each list is sorted and without overlaps."""
    common, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            common.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return common


def report(ranks: dict[int, RankSpans]) -> list[str]:
    """A line per rank."""
    lines = []
    for rank, spans in ranks.items():
        communication, hidden = _ms(spans.communication), _ms(spans.hidden())
        percent = 100 * hidden / communication if communication > 0 else 0.0
        lines.append(
            f"rank {rank}: backward {_ms(spans.backward):.3f} ms, communication "
            f"{communication:.3f} ms, hidden {hidden:.3f} ms, overlap {percent:.1f} %"
        )
    return lines


def _ms(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans) / 1000


def draw(ranks: dict[int, RankSpans], path: Path, num_passes: int) -> None:
    """Two bars per rank over time: what it computed, and what was on its way.

    Raises:
        ArgumentError: matplotlib is missing, or the image cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "drawing needs matplotlib, which is not installed. Hint: pip install matplotlib, or "
            "leave out --output."
        ) from error
    start = min(_start_of_last(spans, num_passes) for spans in ranks.values())
    figure = Figure(figsize=(12, 1.2 + 0.9 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for row, spans in enumerate(ranks.values()):
        _draw_rank(axes, row, spans, start)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.legend(
        *_legend(axes), loc="outside upper center", ncols=len(_COLORS), frameon=False, fontsize=9
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot write {str(path)!r}: {error}.") from error


def _start_of_last(spans: RankSpans, num_passes: int) -> float:
    """Where the last passes begin, the forward of the first of them included."""
    begin = spans.backward[-num_passes:][0][0]
    before = [forward[0] for forward in spans.forward if forward[1] <= begin]
    earlier = [backward[1] for backward in spans.backward if backward[1] <= begin]
    is_own = before and (not earlier or before[-1] >= earlier[-1])
    return before[-1] if is_own else begin


def _draw_rank(axes, row: int, spans: RankSpans, start: float) -> None:
    hidden = spans.hidden()
    bars = {
        "forward": (spans.forward, row - 0.4),
        "backward": (spans.backward, row - 0.4),
        "exposed communication": (spans.communication, row),  # under what is hidden
        "hidden communication": (hidden, row),
    }
    for name, (parts, y) in bars.items():
        shown = [((b - start) / 1000, (e - b) / 1000) for b, e in parts if b >= start]
        axes.broken_barh(shown, (y, 0.36), facecolors=_COLORS[name], label=name)


def _legend(axes) -> tuple[list, list]:
    """One entry per kind, in the order of _COLORS."""
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return [found[name] for name in _COLORS], list(_COLORS)
