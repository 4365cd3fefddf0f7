"""ElasticDataLoader: torch's DataLoader that knows which samples the script has received.

loader = ElasticDataLoader(dataset, 8, sampler=ElasticDistributedSampler(dataset), num_workers=4)
for batch in loader:
    state = loader.state_dict()     # this batch is done; what workers have prefetched is not
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from libddp.elastic._iteration import Iteration
from libddp.elastic.sampler import ElasticDistributedSampler
from libddp.errors import ArgumentError, StateError

__all__ = ["ElasticDataLoader"]


class ElasticDataLoader(DataLoader):
    """A DataLoader with exact positions, whose batch size may change while it runs.

    All of torch's arguments, `num_workers`, `prefetch_factor`, `persistent_workers` and
    `pin_memory` too, have torch's meaning. With an ElasticDistributedSampler it has a state: the
    samples that the script has received. Workers may be ahead of that, by any number of batches.

    DLRover's class of this name goes with an agent that tunes batch sizes in a file. That is left
    out: the file is read when the loader is made and when the script asks for it, as ranks that
    read it by themselves in each step take different sizes. Further differences:

    - `batch_size` is always the one in use; DLRover changes that of `batch_sampler` only, and
      scripts compute positions with the other one;
    - a change takes effect with `drop_last` too;
    - `config_file` is never written to, and one that is missing or damaged is an error;
    - a file without "version", or with version 0, counts.

    Args:
        config_file: a JSON file, {"dataloader": {"batch_size": 16}} or {"batch_size": 16}. A size
            of 0 leaves what `batch_size=` said.

    Raises:
        ArgumentError: a file that cannot be read, or one and a `batch_sampler` of the script's; or
            `in_order=False`, by which workers pass each other, with an ElasticDistributedSampler.

    Note:
        All ranks change the batch size after the same batch, or they end an epoch at different
        steps. Batches that workers have in work keep the size that they have.
    """

    def __init__(self, *args, config_file: str | os.PathLike | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.config_file = config_file
        if type(self.batch_sampler) is BatchSampler and self.batch_size is not None:
            batches = _CountedBatches(self.sampler, self.batch_size, self.drop_last)
            self.__dict__["batch_sampler"] = batches  # torch lets nobody set it later
        if self.num_workers and not getattr(self, "in_order", True) and self._counts():
            raise ArgumentError(
                "libddp: ElasticDataLoader: in_order=False with an ElasticDistributedSampler: what "
                "arrives out of order has no position. Hint: leave in_order out."
            )
        if config_file is not None:
            self.load_config(config_file)

    def __iter__(self) -> Iterator[Any]:
        if not self._counts():
            return super().__iter__()
        with _undrawn(self.generator, if_so=self.sampler._start() > 0):
            batches = super().__iter__()
        return _Received(batches, self.sampler, self.sampler._iteration)

    def load_config(self, config_file: str | os.PathLike | None = None) -> None:
        """Takes the batch size from a file, by default from the one of the constructor.

        Raises:
            ArgumentError: no file, or one without a usable size.
        """
        file = self.config_file if config_file is None else config_file
        if file is None:
            raise ArgumentError(
                "libddp: ElasticDataLoader.load_config: there is no file. Hint: pass its path, or "
                "config_file= when the loader is made."
            )
        batch_size = _configured_batch_size(Path(file))
        if batch_size:
            self.set_batch_size(batch_size)

    def update_batch_size(self, batch_size: int | None = None) -> None:
        """Sets it, or without an argument reads it from the file again, if there is one."""
        if batch_size is not None:
            self.set_batch_size(batch_size)
        elif self.config_file is not None:
            self.load_config()

    def set_batch_size(self, batch_size: int) -> None:
        """From the next batch on that is drawn; on all ranks at the same step.

        Raises:
            ArgumentError: not a positive whole number; the batches are not made by this loader.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ArgumentError(
                f"libddp: ElasticDataLoader: batch_size is {batch_size!r}. Hint: pass a positive "
                "whole number."
            )
        if not isinstance(self.batch_sampler, _CountedBatches):
            raise ArgumentError(
                "libddp: ElasticDataLoader: its batches are not its own, so it cannot set their "
                "size. Hint: pass batch_size and sampler, and no batch_sampler."
            )
        self.batch_sampler.batch_size = batch_size
        self.__dict__["batch_size"] = batch_size

    def get_batch_size(self) -> int | None:
        """The size in use."""
        return self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that the script has received; as the sampler's.

        Raises:
            StateError: no ElasticDistributedSampler, or a `batch_sampler` of the script's.
        """
        return self._sampler_with_state().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on there. The next pass over the epoch draws no random number by itself, since the
        one that it continues has done so: dropout repeats a lost step as it was.

        Raises:
            StateError: as for state_dict.
            ArgumentError: a state of other data.
        """
        self._sampler_with_state().load_state_dict(state)

    def _counts(self) -> bool:
        """Do all samples of an elastic sampler come by this loader's own batches?"""
        return isinstance(self._drawn_by(), ElasticDistributedSampler)

    def _sampler_with_state(self) -> ElasticDistributedSampler:
        if not self._counts():
            raise StateError(
                "libddp: ElasticDataLoader: only an ElasticDistributedSampler has a position, and "
                f"this loader draws by {type(self._drawn_by()).__name__}. Hint: pass "
                "sampler=ElasticDistributedSampler(dataset), and no batch_sampler."
            )
        return self.sampler

    def _drawn_by(self):
        is_own = self.batch_sampler is None or isinstance(self.batch_sampler, _CountedBatches)
        return self.sampler if is_own else self.batch_sampler


class _CountedBatches(BatchSampler):
    """torch's, which notes sizes for the loader; the size may change between two batches."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        return self._batches(indices, getattr(self.sampler, "_iteration", None))

    def _batches(self, indices: Iterator[int], iteration: Iteration | None) -> Iterator[list[int]]:
        size = self.batch_size
        while batch := list(islice(indices, size)):
            if self.drop_last and len(batch) < size:
                return
            if iteration is not None:
                iteration.ahead.append(len(batch))
            yield batch
            size = self.batch_size


class _Received:
    """torch's iterator, which counts what it gives to the script."""

    def __init__(self, batches: Iterator, sampler: ElasticDistributedSampler, iteration) -> None:
        self._batches = batches
        self._sampler = sampler
        self._iteration: Iteration = iteration
        iteration.num_received = 0

    def __iter__(self) -> _Received:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._iteration.is_finished = True
            self._sampler._finish(self._iteration)
            raise
        # Of two passes at once, as when a script looks at one batch amid an epoch: the newest's.
        self._sampler._iteration = self._iteration
        self._iteration.receive()
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)


class _undrawn:
    """Inside, a generator (by default torch's) is used and afterwards is what it was before.

    torch draws a seed for workers, which it does without workers too, once for each pass.
    """

    def __init__(self, generator: torch.Generator | None, if_so: bool) -> None:
        self._generator = generator or torch.default_generator
        self._state = self._generator.get_state() if if_so else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exception) -> None:
        if self._state is not None:
            self._generator.set_state(self._state)


def _configured_batch_size(file: Path) -> int:
    """0: the file sets none."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        size = config.get("dataloader", config).get("batch_size", 0)
    except (OSError, ValueError, AttributeError) as error:
        raise ArgumentError(
            f"libddp: ElasticDataLoader: the configuration {str(file)!r} cannot be read: {error}. "
            'Hint: it is JSON, as in {"dataloader": {"batch_size": 16}}.'
        ) from error
    return size
