"""What a wrapped model tells about itself: buckets, times of its passes, a trace over all ranks."""

from __future__ import annotations

from libddp.nn.parallel._explain import Explanation, explanation
from libddp.nn.parallel._timings import PassTimes, pass_times
from libddp.nn.parallel._trace import save_trace

#: What explain() tells of the arguments.
_OPTIONS = (
    "bucket_bytes_cap",
    "forward_sync_buffers",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
)


class Diagnoses:
    """The part of DistributedDataParallel that shows what it does."""

    def explain(self) -> Explanation:
        """Buckets, parameters, bytes and options of this rank; `print` it. No collective.

        Example:
            >>> print(model.explain())                                 # doctest: +SKIP
        """
        group = self._replica.group()
        options = {name: getattr(self, name) for name in _OPTIONS}
        return explanation(
            self._replica.layout(), rank=group.rank(), world_size=group.size(), options=options
        )

    def wait_shares(self) -> list[float]:
        """For whom this rank waited: parts of the time of the last 25 steps, by rank.

        Only what the end of a backward pass, or a forward that takes rank 0's buffers, had to wait
        for counts. Empty before 25 steps are over. A rank above 0.2 without the three steps that
        cost most (one that evaluates or saves alone) is also named in the log
        (`event=slow_rank`).

        Example:
            >>> model.wait_shares()                                    # doctest: +SKIP
            [0.0, 0.01, 0.0, 0.41]
        """
        return self._replica.wait_shares()

    def timings(self) -> list[PassTimes]:
        """When what happened in this rank's last synchronising passes (at most 32), oldest first.

        Always on; between steps, not inside a backward. No collective.
        """
        return pass_times(self._replica)

    def save_trace(self, path) -> None:
        """A collective: writes the passes of all ranks to `path` of rank 0, for ui.perfetto.dev.

        The ranks' times are aligned. The file appears as a whole or not at all.
        `python -m libddp overlap` draws it.

        Raises:
            ArgumentError: rank 0 cannot write the file. StateError: no pass has synchronised yet.
                Both on every rank.
        """
        save_trace(path, self.timings(), self._replica.group())
