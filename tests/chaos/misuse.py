"""What a rank does that misuses a snapshot, and what it must be told (`WANTED`: by case, for each
rank, the errors in their order: what they begin with, what they have).
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist
import train

import libddp

_CLOSED = ("StateError", "it is closed")
_FORKED = ("StateError", "forked, and only its maker can use it")
_GONE = ("", "rank 1")
_STEPS = ("ArgumentError", "rank 0 saves step 2, rank 1 step 3")
WANTED = {
    "save after close": ([_CLOSED, _CLOSED], [_CLOSED, _CLOSED]),
    "save in a forked child": ([_FORKED], [_FORKED]),
    "save on some ranks only": ([_GONE], [("", "")]),
    "save after the group has failed": ([_GONE, _GONE], []),
    "unequal steps": ([_STEPS], [_STEPS]),
    "save in two threads": ([], []),
    "a value that cannot be kept": (
        [("ArgumentError", "extra['odd'] is a builtins.object")],
        [("ArgumentError", "rank 0 could not save step 2")],
    ),
}


class Rank:
    """With a save of step 1 behind it."""

    def __init__(self, config: dict) -> None:
        self.config = train.DEFAULTS | config
        self.rank = int(os.environ["RANK"])
        self.log = train.Log(self.config["log"], self.rank, self.config["start"])
        torch.set_num_threads(1)
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "libddp", init_method=self.config["init"], rank=self.rank, world_size=world
        )
        self.snapshot = libddp.Snapshot(self.config["folder"], linger=self.config["linger"])
        self.state = {"w": torch.full((4096,), 1.0)}
        self.snapshot.save(1, state=self.state)

    def attempt(self, function) -> None:
        """What it raises is written down."""
        try:
            function()
        except Exception as error:
            self.log.write("said", f"{type(error).__name__}:", error)

    def save(self, step: int = 2, **more) -> None:
        self.snapshot.save(step, **({"state": self.state} | more))

    def check_first(self) -> None:
        """The save before is still there."""
        found = self.snapshot.load()
        if not torch.equal(found["w"], torch.full((4096,), 1.0)):
            self.log.write("said", "wrong:", found)


def _after_close(rank: Rank) -> None:
    rank.snapshot.close()
    rank.attempt(rank.save)
    rank.attempt(rank.snapshot.load)


def _in_child(rank: Rank) -> None:
    child = os.fork()
    if child == 0:
        rank.attempt(rank.save)
        os._exit(0)
    os.waitpid(child, 0)
    rank.check_first()
    rank.snapshot.close()


def _on_some_ranks(rank: Rank) -> None:
    if rank.rank == 0:
        rank.attempt(rank.save)
    else:
        rank.attempt(lambda: dist.all_reduce(torch.ones(7)))


def _after_failure(rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(3)
    rank.attempt(lambda: dist.all_reduce(torch.ones(7)))
    rank.attempt(rank.save)


def _unequal(rank: Rank) -> None:
    rank.attempt(lambda: rank.save(2 + rank.rank))
    rank.check_first()
    rank.snapshot.close()


def _in_threads(rank: Rank) -> None:
    """One after the other in an order of their own they do; each rank has the same order."""
    turn = threading.Lock()
    turn.acquire()

    def second() -> None:
        with turn:
            rank.attempt(lambda: rank.save(3))

    thread = threading.Thread(target=second)
    thread.start()
    rank.attempt(rank.save)
    turn.release()
    thread.join()
    rank.check_first()
    rank.snapshot.close()


def _odd_value(rank: Rank) -> None:
    odd = {"odd": object()} if rank.rank == 0 else {}
    rank.attempt(lambda: rank.save(state=None, extra=odd))
    rank.check_first()
    rank.snapshot.close()


_CASES = {
    "save after close": _after_close,
    "save in a forked child": _in_child,
    "save on some ranks only": _on_some_ranks,
    "save after the group has failed": _after_failure,
    "unequal steps": _unequal,
    "save in two threads": _in_threads,
    "a value that cannot be kept": _odd_value,
}


def main(config: dict) -> None:
    rank = Rank(config)
    _CASES[config["case"]](rank)
    rank.log.write("ended")
