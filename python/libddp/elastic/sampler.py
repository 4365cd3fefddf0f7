"""ElasticDistributedSampler: torch's DistributedSampler that goes on where another one stopped.

sampler = ElasticDistributedSampler(dataset)
loader = ElasticDataLoader(dataset, batch_size=8, sampler=sampler)
state = sampler.state_dict()            # anywhere in the loop
sampler.load_state_dict(state)          # in another process, of any number of ranks
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from libddp.elastic._iteration import Iteration
from libddp.errors import ArgumentError, StateError

__all__ = ["ElasticDistributedSampler"]


class ElasticDistributedSampler(DistributedSampler):
    """Torch's sampler, whose position in an epoch can be kept and taken up by any number of ranks.

    All ranks together go through an epoch in one order, which depends on `seed` and on the epoch
    only; a position is how much of that order is done. So no sample of an epoch is left out or seen
    twice, wherever the cut was and however often the number of ranks changed, but for what torch
    itself adds (or, with `drop_last`, leaves out) at the end so that ranks have equally many. With
    the same number of ranks the order is that of a run which was never cut.

    The signature and the keys "completed_num" and "epoch" of states are those of DLRover's class of
    this name, whose states load. It differs where DLRover's gives wrong data in silence:

    - padding is that of the whole epoch; DLRover's comes from the samples that were left at load;
    - a step counter that goes over epochs, or goes on over a change of the number of ranks (both
      as in DLRover's examples), names no sample: DLRover takes steps x batch x ranks modulo the
      size of the dataset. Here ElasticDataLoader counts what the script has received, and without
      it a count that cannot be right is an error;
    - another dataset size, seed or `shuffle` at load is an error;
    - a position holds for one pass through its epoch; DLRover cuts each later pass too;
    - `len()` is right at once after `set_epoch`;
    - made before init_process_group on one of several ranks it is an error; DLRover's reads all
      the data on each of them.

    Args:
        dataset: of constant size and order.
        num_replicas: ranks that share it; the process group's, or 1.
        rank: this one's number.
        shuffle, seed, drop_last: as in torch. `seed` must be the same on all ranks.

    Raises:
        StateError: no process group, and the environment says that there are several ranks.

    Example:
        >>> sampler = ElasticDistributedSampler(range(6), num_replicas=2, rank=0, shuffle=False)
        >>> sampler.load_state_dict({"epoch": 0, "completed_num": 2})
        >>> list(sampler)
        [2, 4]
    """

    def __init__(
        self,
        dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not dist.is_initialized():
            num_replicas, rank = _place_alone(num_replicas, rank)
        #: Epoch, samples done of it and the step counter, of the state that was loaded.
        self._loaded = (0, 0, 0)
        #: The pass that the script is in, or was in last.
        self._iteration: Iteration | None = None
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)

    def __iter__(self) -> Iterator[int]:
        start = self._start()
        base_step = self._loaded[2] if start else 0
        self._iteration = Iteration(self.epoch, start, base_step)
        self._count_samples()
        return self._draw(self._iteration)

    def __len__(self) -> int:
        self._count_samples()
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """As torch's. The loaded position is that of its own epoch; others begin at 0."""
        super().set_epoch(epoch)
        self._count_samples()

    def state_dict(
        self, iter_step: int | None = None, micro_batch_size: int | None = None
    ) -> dict[str, Any]:
        """The position of all ranks, of plain numbers; it is the same on each of them.

        With ElasticDataLoader: what the script has received of its newest pass, prefetched batches
        excluded. Then `iter_step` says at most that the batch in hand is not done, by being one
        less than the number of received ones (of this pass, or going on from the loaded counter).

        With another DataLoader only the script knows it, and says it:

        Args:
            iter_step: batches of this epoch that this rank has taken, counted from its begin, from
                load_state_dict, or going on from the loaded counter.
            micro_batch_size: samples in each.

        Raises:
            StateError: another DataLoader, and no arguments.
            ArgumentError: they contradict what was drawn.

        Note:
            Call it after as many batches on each rank. With accumulated gradients, after a step of
            the optimizer: what is accumulated is in no state.
        """
        step = _whole("iter_step", iter_step, 0)
        state = {
            "completed_num": self._num_completed(
                step, _whole("micro_batch_size", micro_batch_size)
            ),
            "epoch": self.epoch,
            "dataset_size": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
        return state if step is None else {**state, "iter_step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the epoch, of which the next pass begins where the state was taken.

        `{}` is the begin of epoch 0. The position holds until a pass has come to its end.

        Raises:
            ArgumentError: a state of another dataset, seed or order; a position beyond the end.
        """
        own = {"dataset_size": len(self.dataset), "shuffle": self.shuffle}
        if self.shuffle:
            own["seed"] = self.seed
        for name, value in own.items():
            if state.get(name, value) != value:
                raise ArgumentError(
                    f"libddp: ElasticDistributedSampler.load_state_dict: {name} is {state[name]} "
                    f"in the state and {value} here, so its position names other samples. Hint: "
                    f"make the sampler with the same {name}, or start the epoch anew with {{}}."
                )
        completed = _whole("completed_num", state.get("completed_num", 0), 0)
        if completed > len(self.dataset):
            raise ArgumentError(
                f"libddp: ElasticDistributedSampler.load_state_dict: completed_num is {completed} "
                f"and the dataset has {len(self.dataset)} samples. Hint: DLRover writes that where "
                "steps are counted over several epochs; put in how many of this epoch are done."
            )
        self.epoch = _whole("epoch", state.get("epoch", 0), 0)
        self._loaded = (self.epoch, completed, _whole("iter_step", state.get("iter_step", 0), 0))
        self._iteration = None
        self._count_samples()

    def _start(self) -> int:
        """Samples that the next pass over this epoch leaves out."""
        epoch, completed, _ = self._loaded
        return completed if epoch == self.epoch else 0

    def _finish(self, iteration: Iteration) -> None:
        """The pass has come to its end, and the next one begins at the epoch's begin."""
        if (iteration.epoch, iteration.start) == self._loaded[:2]:
            self._loaded = (0, 0, 0)
        self._count_samples()

    def _count_samples(self) -> None:
        """torch's attributes, for the next pass over this epoch."""
        self.total_size = self._num_left(self._start())
        self.num_samples = self.total_size // self.num_replicas

    def _num_left(self, start: int) -> int:
        """Of the epoch behind `start`, as many for each rank."""
        padding = 0 if self.drop_last else self.num_replicas - 1
        left = len(self.dataset) - start + padding
        return left - left % self.num_replicas

    def _order(self, epoch: int, start: int) -> list[int]:
        """What is this rank's of the epoch from `start` on; torch's padding is the begin anew."""
        size = len(self.dataset)
        first, end = start + self.rank, start + self._num_left(start)
        places = torch.arange(first, max(first, end), self.num_replicas, device="cpu")
        places %= max(size, 1)
        if not self.shuffle:
            return places.tolist()
        generator = torch.Generator(device="cpu")
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(size, generator=generator, device="cpu")[places].tolist()

    def _draw(self, iteration: Iteration) -> Iterator[int]:
        # Only now, since torch's workers make each pass twice and use one.
        for index in self._order(iteration.epoch, iteration.start):
            iteration.num_drawn += 1
            yield index
        self._finish(iteration)

    def _num_completed(self, step: int | None, batch_size: int | None) -> int:
        """Of all ranks."""
        iteration = self._iteration
        if iteration is None or iteration.epoch != self.epoch:
            if iteration is None and step not in (None, 0, self._loaded[2]):
                raise ArgumentError(
                    f"libddp: ElasticDistributedSampler.state_dict: {step} steps, and this sampler "
                    "has handed out nothing. Hint: ask the one that the DataLoader iterates over."
                )
            return self._start()
        if iteration.is_finished:
            return len(self.dataset)
        if iteration.num_received is not None:
            num_done = iteration.num_done(step)
        elif step is None or batch_size is None:
            raise StateError(
                "libddp: ElasticDistributedSampler.state_dict: it knows what a DataLoader drew, "
                "not what the script received of it. Hint: use ElasticDataLoader, which counts, or "
                "pass iter_step and micro_batch_size."
            )
        else:
            num_done = iteration.num_done_by_steps(step, batch_size)
        return min(iteration.start + num_done * self.num_replicas, len(self.dataset))


def _place_alone(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Without a process group: what was given, else the only rank."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if num_replicas is None and rank is None and world_size > 1:
        raise StateError(
            f"libddp: ElasticDistributedSampler: no process group, and WORLD_SIZE is {world_size}: "
            "each rank would read all of the data. Hint: call init_process_group first, or pass "
            "num_replicas and rank."
        )
    num_replicas = num_replicas or 1
    if rank is None and num_replicas > 1:
        raise ArgumentError(
            f"libddp: ElasticDistributedSampler: num_replicas is {num_replicas}, and neither rank "
            "nor a process group says which one this is. Hint: pass rank."
        )
    return num_replicas, rank or 0


def _whole(name: str, value: Any, least: int = 1) -> int | None:
    """As an int; DLRover's scripts compute counts by `/` too."""
    if value is None:
        return None
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = least - 1
    if whole < least or whole != value:
        raise ArgumentError(
            f"libddp: ElasticDistributedSampler: {name} is {value!r}. Hint: pass a whole number, "
            f"{least} or more."
        )
    return whole
