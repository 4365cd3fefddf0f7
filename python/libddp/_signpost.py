"""Where the launchers' store of a run was, launchers that start are sent to where it is now.

A supervisor starts a launcher that has died with the same --rdzv-endpoint. It serves a fresh store
there, and would begin a second run of the same job. So the launcher with the store looks whether
somebody serves one at the places where it has been, and notes in it where the run is. A launcher
finds the note before its first meeting (_standby.py), for which it waits 30 s, or what
last_call_timeout says.

    signpost = Signpost(backend, [("10.0.0.1", 29400)], ("10.0.0.2", 41233))
    signpost.start()
    signpost.end()

Thread rule: a thread of its own, with connections of its own; start() and end() from any.
"""

from __future__ import annotations

import json
import threading

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from libddp import _store_sockets

_LOOK_SECONDS = 1.0
_NOTE = "moved"


class Signpost(threading.Thread):
    """That of a launcher that has the store."""

    def __init__(self, backend, before: list[tuple[str, int]], here: tuple[str, int]) -> None:
        super().__init__(name="libddp-signpost", daemon=True)
        self._at, self._before, self._text = backend.at, before, json.dumps(here)
        self._over = threading.Event()

    def end(self) -> None:
        """Nobody is sent here any more."""
        self._over.set()

    def run(self) -> None:
        """See base class."""
        while not self._over.wait(_LOOK_SECONDS):
            for place in self._before:
                self._tell(place)

    def _tell(self, place: tuple[str, int]) -> None:
        store = _store_sockets.connect(place)
        if store is None:
            return
        try:
            there = self._at(store)
            # Where launchers have met already they are those of before, behind a torn network.
            if there.noted("here") is None and there.noted(_NOTE) != self._text:
                there.note(_NOTE, self._text)
        except RendezvousConnectionError:
            return  # gone again


def read(backend) -> tuple[str, int] | None:
    """Where the run is whose store was at this one's place; None: here, as far as it is known."""
    text = backend.noted(_NOTE)
    return tuple(json.loads(text)) if text else None
