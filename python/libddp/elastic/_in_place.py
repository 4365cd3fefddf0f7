"""`@libddp.elastic.run`: `libddp run --in-place` lets the process go on when a rank is lost."""

from __future__ import annotations

import functools
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from libddp import _epochs, _steps
from libddp._load import load
from libddp.errors import NetworkError, PeerError, StateError, StoreError, TimeoutError

_C = load()
_Result = TypeVar("_Result")
#: For the launcher's answer: it knows how long it waits for whom, and says so.
_ANSWER_SECONDS = 3600.0


@dataclass(frozen=True)
class Info:
    """Which epoch this is: a meeting of all ranks, and what they do until one is lost or comes."""

    #: All ranks' number of it, from 0.
    epoch: int = 0
    #: Of --max-restarts, used so far.
    restarts: int = 0
    #: This process was in an epoch before.
    is_survivor: bool = False
    #: Why the epoch before ended, in a line; "" where nothing failed.
    last_failure: str = ""


_info = Info()


def info() -> Info:
    """Which epoch this is; epoch 0 without `libddp run --in-place`.

    Example:
        >>> from libddp import elastic
        >>> elastic.info().is_survivor
        False
    """
    return _info


def run(main: Callable[..., _Result]) -> Callable[..., _Result]:
    """Makes `main` go on from its start, in the same process, when another rank is lost.

    Under `libddp run --in-place` the launcher replaces the rank. Here the process group is
    destroyed, all ranks meet again, RANK, WORLD_SIZE and their like are set, and `main` is called
    anew: it makes the group, wraps the model, and loads the newest snapshot. What lies outside of
    `main` stays; a wrapped model that is kept there goes on in the new group by its `rejoin()`. A
    rank's own exception ends it as ever, and elsewhere `main` is just called.

    Note:
        Other ranks that fail, a network that does, and a host that comes are noticed in the next
        wait for other ranks; a rank without one is asked to leave, and ended after
        --rejoin-timeout. Snapshots that were open are left, and what they hold stays; `main` makes
        another one. All ranks of a program use the decorator, or none.

    Example:
        >>> from libddp import elastic
        >>> @elastic.run
        ... def main(steps):
        ...     return steps * 2
        >>> main(2)
        4
    """

    @functools.wraps(main)
    def call(*args, **kwargs) -> _Result:
        line = _C.LauncherLine.find()
        if line is None:
            return main(*args, **kwargs)
        line.arrive()
        line.come("")
        _begin(line.wait(_ANSWER_SECONDS))
        while True:
            try:
                return main(*args, **kwargs)
            except Exception as error:
                if not _is_of_others(error):
                    raise
                next_epoch = _rejoin(line, error)
            _begin(next_epoch)

    return call


def _rejoin(line, error: Exception) -> dict:
    """Leaves the groups of the epoch and waits for the next one; raises `error` if none comes."""
    line.arrive()
    _epochs.end()
    if dist.is_initialized():
        from libddp.distributed import destroy_process_group

        destroy_process_group()
    line.come(_first_line(error))
    # Models and optimizers of the failed call go while nothing else is to be done.
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    try:
        return line.wait(_ANSWER_SECONDS)
    except StateError:
        pass
    raise error  # the launcher ends the run: this is what the rank ends of


def _begin(next_epoch: dict) -> None:
    """Takes over who this process is now."""
    global _info
    environment = next_epoch["environment"]
    os.environ.update(environment)
    _steps.open_page(environment.get("TORCHELASTIC_ERROR_FILE"))
    _info = Info(
        next_epoch["epoch"],
        next_epoch["restarts"],
        next_epoch["is_survivor"],
        next_epoch["failure"],
    )


def _is_of_others(error: BaseException) -> bool:
    """Whether it tells of another rank's end, or follows such an error; not of a mistake here."""
    is_asked = _C.LauncherLine.is_asked()
    for each in _chain(error):
        if is_asked and isinstance(each, dist.DistError):
            return True
        # Ranks that called different things (no single culprit) would do so again.
        if isinstance(each, PeerError) and each.peer_rank >= 0:
            return True
        if isinstance(each, (NetworkError, StoreError, TimeoutError)):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it was raised from or in."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]
