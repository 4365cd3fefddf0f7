"""One pass of a rank over an epoch: where in the epoch it began, and how far it is."""

from __future__ import annotations

from collections import deque

from libddp.errors import ArgumentError


class Iteration:
    """Made by ElasticDistributedSampler, counted by it and by ElasticDataLoader.

    What the sampler has handed out is no position: a DataLoader with workers draws ahead. Only who
    gives the script its batches knows it: ElasticDataLoader, or the script itself.

    Args:
        epoch: the pass is over this one.
        start: samples of the epoch, of all ranks, that were done before it.
        base_step: `iter_step` of the state that it goes on from; 0 where it is unknown, or where
            the pass begins the epoch.
    """

    def __init__(self, epoch: int, start: int, base_step: int = 0) -> None:
        self.epoch = epoch
        self.start = start
        #: Samples of this rank that the sampler has given away.
        self.num_drawn = 0
        #: Sizes of the batches that were drawn and did not reach the script yet.
        self.ahead: deque[int] = deque()
        #: Samples of this rank that reached the script; None where no ElasticDataLoader counts.
        self.num_received: int | None = None
        self.num_batches = 0
        #: Its last batch has been followed by StopIteration.
        self.is_finished = False
        self._last_batch_size = 0
        #: What the script's counter said when this pass began: one of these.
        self._bases = {0, base_step}

    def receive(self) -> None:
        """The oldest batch ahead reaches the script."""
        self._last_batch_size = self.ahead.popleft() if self.ahead else 1
        self.num_received += self._last_batch_size
        self.num_batches += 1

    def num_done(self, step: int | None) -> int:
        """Samples of this rank that the script is done with, where ElasticDataLoader counts.

        The batch in hand is among them, unless the script's counter is one less than that.
        """
        if step is not None and any(step - base == self.num_batches - 1 for base in self._bases):
            return self.num_received - self._last_batch_size
        return self.num_received

    def num_done_by_steps(self, step: int, batch_size: int) -> int:
        """The same, where only the script counts.

        Raises:
            ArgumentError: that many batches cannot have been taken; or the counter may count from
                this pass's begin as well as from the epoch's, which differ.
        """
        num_batches_drawn = -(-self.num_drawn // batch_size)
        fitting = {base for base in self._bases if 0 <= step - base <= num_batches_drawn}
        if len(fitting) != 1:
            raise ArgumentError(self._unclear(step, batch_size, num_batches_drawn, fitting))
        self._bases = fitting
        [base] = fitting
        return min((step - base) * batch_size, self.num_drawn)

    def _unclear(self, step: int, batch_size: int, num_drawn: int, fitting: set[int]) -> str:
        if fitting:
            why = (
                f"may count from this epoch's begin or go on from the loaded {max(fitting)}, and "
                "the samples that were drawn ahead of the script fit to both"
            )
        else:
            why = f"of {batch_size} samples are not what was drawn of it: {num_drawn} batches"
        return (
            f"libddp: ElasticDistributedSampler.state_dict in epoch {self.epoch}: {step} steps "
            f"{why}. Hint: ElasticDataLoader counts what the script receives, whatever its own "
            "counter says; with another DataLoader count the batches of this epoch."
        )
