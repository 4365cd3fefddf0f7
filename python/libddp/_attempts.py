"""The starts of one launcher's workers: an error that comes again at the same place ends the run.

A program's mistake meets every new start in the same way, so --max-restarts would only repeat it.
What counts as the same: exception and text (numbers and temporary names aside) and the program's
line, of an exception that a rank raised itself, and no progress in between: the same step where the
ranks note steps (libddp.Snapshot does), else a start that lasted no longer than the one before.

    attempts = Attempts(workers, max_restarts=3, retry_same_error=False)
    attempts.check()        # before each start

A worker that a signal ended has said nothing, so it is started again.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from libddp import _failure_report, _worker_ends
from libddp._last_words import LastWords

#: What differs although the error is the same: addresses, pids, times, names of temporary files.
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?|\btmp[a-z0-9_]{8}\b|, rank \d+/\d+")
#: How much longer a start may last that has come no further: machines are busy at times.
_SLACK, _SLACK_SECONDS = 1.1, 2.0


@dataclass
class Attempt:
    """One start of the workers, that failed."""

    first: LastWords
    seconds: float


def is_same(old: Attempt, new: Attempt) -> bool:
    """Whether a start ended as the one before did, without progress."""
    a, b = old.first, new.first
    if not (_is_own(a) and _is_own(b)) or (_plain(a.text), a.place) != (_plain(b.text), b.place):
        return False
    if b.step is not None:
        return a.step == b.step
    return new.seconds <= old.seconds * _SLACK + _SLACK_SECONDS


def _is_own(end: LastWords) -> bool:
    """An exception of the program's, and not what became of another rank's end."""
    return bool(end.path and end.place) and (end.is_nobodys or not end.follows)


def _plain(text: str) -> str:
    return _CHANGING.sub("#", text)


class Attempts:
    """Counts the starts, and refuses one that would only fail again."""

    def __init__(self, workers: _worker_ends.Workers, max_restarts: int, retry_same_error: bool):
        self._workers = workers
        self.max_restarts = max_restarts
        self._retry_same_error = retry_same_error
        self._last: Attempt | None = None
        #: So many failed, and workers were started again.
        self.restarts = 0
        #: For the last screen.
        self.note = ""

    @property
    def last_failure(self) -> LastWords | None:
        """Why the workers were started again."""
        last = self._last
        return last.first if last else None

    def check(self) -> None:
        """Before the hosts meet for a start of workers.

        Raises:
            ChildFailedError: the workers have failed as they did before.
        """
        failures = self._workers.failed()
        if failures:
            ends = _failure_report.ends_of(self._workers.failures(failures))
            self._refuse_same(ends[0], failures)
            self._count(ends)

    def came_back(self, rank: int, why: str) -> None:
        """--in-place: all workers of this host have come for another epoch, and none has ended.

        A network has failed, or another host. It counts, and is never the same as another one.
        """
        end = LastWords(rank, why, "", time.monotonic(), True)
        self._last = Attempt(end, 0.0)
        self._count([end])

    def _count(self, ends: list[LastWords]) -> None:
        self.restarts += 1
        _failure_report.tell_restart(ends, self.restarts, self.max_restarts)

    def _refuse_same(self, first: LastWords, failures: dict) -> None:
        attempt = Attempt(first, time.monotonic() - self._workers.started)
        last, self._last = self._last, attempt
        if last is None or self._retry_same_error or not is_same(last, attempt):
            return
        at = "" if first.step is None else f" at step {first.step}"
        self.note = (
            f"the same error twice{at}, so it would come again: not started again in spite of "
            f"--max-restarts={self.max_restarts} (Hint: --retry-same-error)"
        )
        raise ChildFailedError("libddp run", failures)
