"""When what happened in the last synchronising passes: the answer of timings()."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one pass; times as in PassTimes. ready <= launched <= done."""

    index: int
    parameters: tuple[str, ...]
    #: Bytes that travelled: gradients, padding and flags.
    bytes: int
    #: All gradients were there. What the end of the pass had to wait for is ready when it is sent.
    ready_ns: int
    #: Its communication was handed over; it begins when that of the buckets before is done.
    launched_ns: int
    #: Its communication ended, whenever somebody waited for it. With a communication hook: its
    #: result was taken. Else None on a device: the host does not ask it.
    done_ns: int | None


@dataclass(frozen=True)
class PassTimes:
    """One backward pass that synchronised. Times are those of time.monotonic_ns()."""

    #: Counts the synchronising passes of the model, from 1.
    number: int
    #: The last forward before the pass; None where there was none (an empty pass in join()).
    forward_begin_ns: int | None
    forward_end_ns: int | None
    #: This rank's own computation; from its end to the pass's, it waits for the last buckets.
    backward_begin_ns: int
    backward_end_ns: int
    pass_end_ns: int
    buckets: tuple[BucketTimes, ...]

    def communication(self) -> list[tuple[int, int]]:
        """When each bucket was really on its way: one after the other, from its launch on.

        On a device that is the launch alone, whose end is not known.
        """
        spans = []
        free_ns = 0
        for bucket in self.buckets:
            done_ns = bucket.launched_ns if bucket.done_ns is None else bucket.done_ns
            begin_ns = min(max(bucket.launched_ns, free_ns), done_ns)
            spans.append((begin_ns, done_ns))
            free_ns = max(free_ns, done_ns)
        return spans


def pass_times(replica) -> list[PassTimes]:
    """From what the C++ side tells (bindings/ddp_timeline.cpp), oldest first."""
    layouts, passes = replica.timings()
    return [_pass(layouts, *times) for times in passes]


def _pass(layouts, number, forward_begin, forward_end, begin, end, pass_end, buckets, layout):
    _, _, described, _ = layouts[layout]
    return PassTimes(
        number=number,
        forward_begin_ns=forward_begin or None,
        forward_end_ns=forward_end or None,
        backward_begin_ns=begin,
        backward_end_ns=end,
        pass_end_ns=pass_end,
        buckets=tuple(
            BucketTimes(index, tuple(names), total_bytes, ready, launched, done or None)
            for index, ((names, _, _, total_bytes, _), (ready, launched, done)) in enumerate(
                zip(described, buckets, strict=True)
            )
        ),
    )
