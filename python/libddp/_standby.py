"""When the host of the launchers' store is gone, they meet at a store on the next one.

    standby = Standby(handler, backend, is_on=True)
    info = standby.meet()        # in the place of the handler's next_rendezvous

Each launcher keeps a port for a store, and its card of a meeting says which (_meetings.py). One
that has lost the store serves a store there, looks at those of the other hosts of the last meeting,
and votes at the first of them, in the order of ranks, that answers. Where more than half have voted
the run goes on: that store says so, and all go there, those too that come later. The old store is
looked at as well: a network that was away for a moment moves nobody.

Which launchers go on is not decided here but by _meetings.py, as at any other meeting.

A launcher whose store stays, and that is not joined by enough hosts, goes where these have met, or
ends. A launcher with the store that a signal ends says so first, so that the others move at once.
One that starts where the store was is sent to where it is (_signpost.py).

Thread rule: the launcher's first thread; departures also that which tells them.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from libddp import _signpost, _store_sockets
from libddp._hosts import say
from libddp._meetings import Meetings, is_most

#: For launchers that have lost the store to come together elsewhere, and for those at a store to be
#: enough. A launcher comes when its workers are stopped, or have come (--in-place).
MOVE_SECONDS = 30.0
#: From more than half to the begin: the others have noticed by then, and are in the first meeting.
LATE_SECONDS = 1.0
#: For the others to see that the launcher with the store has closed the run, or leaves it.
LINGER_SECONDS = 3.0
_LOOK_SECONDS = 0.1
_MAX_CONNECTS = 32


class CutOffError(RendezvousClosedError):
    """The run may go on without this host, so it ends here."""


class MovedError(RendezvousError):
    """This launcher is where the run was, which is `at` another place now."""

    def __init__(self, at: tuple[str, int]) -> None:
        super().__init__(f"the run is at {at}")
        self.at = at


class Standby:
    """The launchers' store, as one launcher sees it."""

    def __init__(self, handler, backend, is_on: bool) -> None:
        self._handler, self._backend, self.is_on = handler, backend, is_on
        self._meet, self._shutdown = handler.next_rendezvous, handler.shutdown
        self._world, self._seen = handler._get_world, 0
        handler._get_world = self._see_world
        self.meetings = Meetings(repr(handler._this_node), is_on)
        self.departures = Departures(self)
        self._port: _store_sockets.Port | None = None
        #: Of the store that is served here while launchers vote.
        self._own = None
        #: Servers of the workers' stores of this start and the one before, whose workers may still
        #: be about to end.
        self._workers_stores: list = []
        #: Backends by the host that serves their store; "": where this launcher was.
        self._others: dict = {}
        self._since_most: float | None = None
        #: Where the store was, the oldest first.
        self._before: list[tuple[str, int]] = []
        self._signpost: _signpost.Signpost | None = None
        self._first_store = None
        if is_on:
            backend.before_read = self._heed_signpost
            self._port = _store_sockets.Port()
            _store_sockets.notice_loss(backend.store)
            self._at = backend.store.host, backend.store.port
            self.is_server = _store_sockets.is_served_here(backend.store)

    def meet(self) -> RendezvousInfo:
        """A meeting that counts.

        Raises:
            CutOffError: other hosts may go on without this one.
            RendezvousClosedError, RendezvousTimeoutError, RendezvousConnectionError: as torch's.
        """
        limit = None
        while True:
            try:
                if self._is_left_by_server():
                    self._follow()
                self._settle_workers_store()
                info = self._meet()
                if self.is_on and self.meetings.last is None:
                    self._learn_place()
                cards = self.meetings.settle(
                    self._backend, self._seen, info.rank, info.world_size, self._card(info)
                )
                if cards is not None:
                    return self._begin(info, cards)
            except MovedError as moved:
                self._go_to_run(moved.at)
                limit = None
                continue
            except (RendezvousConnectionError, DistError) as error:
                if not self.is_lost(error):
                    raise
                self._move()
                limit = None
                continue
            limit = limit or time.monotonic() + MOVE_SECONDS
            if self._find_newer():
                limit = None
            elif time.monotonic() > limit:
                self._end("are together there")

    def is_lost(self, error: Exception) -> bool:
        """Whether the launchers are to meet elsewhere after this error."""
        if not self.is_on or self.meetings.last is None:
            return False
        if self._backend.is_closed:
            raise RendezvousClosedError from error
        try:
            self._backend.are_noted(["here"])
        except RendezvousConnectionError:
            return True
        return False

    def shutdown(self) -> bool:
        """Closes the run. A launcher with the store waits for the others to know it, who would
        else take the store for lost.
        """
        self._end_signpost()
        is_closed = self._shutdown()
        if is_closed and self.is_on and self.meetings.last is not None:
            try:
                self._backend.note(self._gone(self.meetings.host), "left")
            except RendezvousConnectionError:
                return is_closed  # the launcher with the store was faster
            self.linger()
        return is_closed

    def linger(self) -> None:
        """A launcher with the store ends after the others, or nearly."""
        if not self.is_on or not self.is_server:
            return
        names = [self._gone(host) for host in self.meetings.others()]
        limit = time.monotonic() + LINGER_SECONDS
        try:
            while names and not self._backend.are_noted(names) and time.monotonic() < limit:
                time.sleep(_LOOK_SECONDS)
        except RendezvousConnectionError:
            return  # the store is elsewhere by now

    def _learn_place(self) -> None:
        """A host that comes to a run that has moved."""
        here = _read_place(self._backend)
        if here:
            _, self.meetings.store, self._before = here

    def _gone(self, host: str) -> str:
        return f"gone/{self.meetings.id}/{host}"

    def _see_world(self) -> tuple[int, int]:
        """Which meeting it is, from the state that torch takes the ranks from."""
        self._seen = self._handler._state_holder.state.round
        return self._world()

    def _settle_workers_store(self) -> None:
        """After the first meeting that of torch is not used any more (_card).

        torch 2.11 ends with an AssertionError where a host that was not the first one then is now.
        """
        handler = self._handler
        if handler._bootstrap_store_info and not handler._shared_tcp_store_server:
            handler._shared_tcp_store_server = self._backend.store

    def _card(self, info: RendezvousInfo) -> dict:
        """Tells where this host's stores would be.

        torch's first host does that at its first meeting only: a host that joins later waits for it
        in vain, hosts that stay keep the workers' store of the one that was first before, and
        workers that count on a store of their own (torch's gloo) find the addresses of dead ranks.
        """
        own = info.bootstrap_store_info
        address, port = own.master_addr, own.master_port
        if info.rank == 0:
            if self._handler.use_agent_store:
                address = self._handler._this_node.addr
                server = self._handler._create_tcp_store_server(address, 0)
                self._workers_stores, port = [*self._workers_stores[-1:], server], server.port
            info.store.set(own.MASTER_ADDR_KEY, address)
            info.store.set(own.MASTER_PORT_KEY, str(port))
        number = self._port.number if self._port else 0
        return {"place": [self._handler._this_node.addr, number], "master": [address, port]}

    def _begin(self, info: RendezvousInfo, cards: list[dict]) -> RendezvousInfo:
        """Every meeting has the workers' store of its own first host."""
        self._others = {}
        if self.is_on and info.rank == 0:
            self._tell_place(self._backend, self.meetings.last.number, self.meetings.store)
        address, port = cards[0]["master"]
        agreed = RendezvousStoreInfo(master_addr=address, master_port=int(port))
        return RendezvousInfo(info.store, info.rank, info.world_size, agreed)

    # To another store.

    def _is_left_by_server(self) -> bool:
        """Whether the launcher with the store is about to end."""
        return self.is_on and self.meetings.last is not None and bool(self._backend.noted("leaves"))

    def _follow(self) -> None:
        self.meetings.look_for_departed(self._backend)
        self._backend.note(self._gone(self.meetings.host), "left")
        self._move()

    def _move(self) -> None:
        """To where the run goes on.

        Raises:
            CutOffError: it does nowhere, as far as this host can see.
        """
        self._handler._stop_heartbeats()
        limit = time.monotonic() + MOVE_SECONDS
        say(
            f"the launchers' store at {_text(self._at)} is gone; this host looks for the others "
            f"for {MOVE_SECONDS:.0f} s"
        )
        while not self._look():
            if time.monotonic() > limit:
                self._end("were found")
            time.sleep(_LOOK_SECONDS)

    def _look(self) -> bool:
        """Whether the run is found somewhere; if not, this host has its vote where it should."""
        if self._find_newer(is_equal_enough=True):
            return True
        if self.meetings.in_doubt:
            return False
        if self._own is None:
            self._own = self._backend.at(self._port.serve())
        hosts = [self.meetings.host, *self.meetings.others()]
        order = [host for host in self.meetings.last.hosts if host in hosts]
        first = next(h for h in order if h == self.meetings.host or h in self._others)
        if first != self.meetings.host:
            self._vote_at(first)
        elif self._is_elected(len(hosts)):
            number = self.meetings.last.number
            self._own.open(number + 1)
            place = f"{number + 1}/{self.meetings.host}"
            self._before = [*self._before, self._at]
            self._tell_place(self._own, number, place)
            self._adopt(self._own, place, self._own_place())
            return True
        return False

    def _find_newer(self, is_equal_enough: bool = False) -> bool:
        """Goes to where the hosts of the last meeting have gone on, if they have."""
        if not self.is_on or self.meetings.last is None:
            return False
        self._connect()
        found = []
        for host, backend in list(self._others.items()):
            try:
                here = None if backend.noted("leaves") else _read_place(backend)
            except RendezvousConnectionError:
                del self._others[host]
                continue
            if here and here[0] + is_equal_enough > self.meetings.last.number:
                found.append((here[0], here[1] != self.meetings.store, host, *here[1:]))
        if not found:
            return False
        _, _, host, place, self._before = max(found)
        at = self.meetings.last.hosts[host] if host else self._at
        self._adopt(self._others[host], place, at)
        return True

    def _connect(self) -> None:
        """To the stores of the other hosts that serve one, and to that of before."""
        wanted = {host: self.meetings.last.hosts[host] for host in self.meetings.others()}
        wanted[""] = self._at
        missing = [host for host in wanted if host not in self._others]
        with ThreadPoolExecutor(min(_MAX_CONNECTS, len(missing) or 1)) as pool:
            stores = pool.map(_store_sockets.connect, [wanted[host] for host in missing])
            for host, store in zip(missing, stores, strict=True):
                if store is not None:
                    self._note_other(host, store)

    def _note_other(self, host: str, store) -> None:
        try:
            self._others[host] = self._backend.at(store)
        except RendezvousConnectionError:
            return  # gone again

    def _vote_at(self, host: str) -> None:
        self._since_most = None
        try:
            self._others[host].note(f"vote/{self.meetings.id}/{self.meetings.host}", host)
        except RendezvousConnectionError:
            del self._others[host]

    def _is_elected(self, size: int) -> bool:
        """More than half have voted for this host, and the rest had a moment to."""
        name, others = f"vote/{self.meetings.id}", self.meetings.others()
        votes = 1 + sum(self._own.noted(f"{name}/{h}") == self.meetings.host for h in others)
        if not is_most(votes, size, is_home=False):
            self._since_most = None
            return False
        now = time.monotonic()
        self._since_most = self._since_most or now
        is_late = now > self._since_most + LATE_SECONDS
        # One of the hosts has gone without a word, unless some have told.
        return is_late or votes >= (size if self.meetings.departed else size - 1)

    def _own_place(self) -> tuple[str, int]:
        return self._handler._this_node.addr, self._port.number

    def _heed_signpost(self) -> None:
        """
        Raises:
            MovedError: the run is elsewhere, and this launcher has met nobody yet.
        """
        at = _signpost.read(self._backend) if self.meetings.last is None else None
        if at:
            raise MovedError(at)

    def _go_to_run(self, at: tuple[str, int]) -> None:
        """
        Raises:
            CutOffError: it cannot be reached.
        """
        limit = time.monotonic() + MOVE_SECONDS
        while not (here := self._run_at(at)):
            if time.monotonic() > limit:
                raise self._cut_off(
                    f"the run with this id has moved from here to the store at {_text(at)}, which "
                    f"did not answer for {MOVE_SECONDS:.0f} s. Hint: look whether the run has "
                    "ended meanwhile, and whether that address can be reached from this host."
                )
            time.sleep(_LOOK_SECONDS)
            at = self._sent_to(at)
        _, place, self._before = here
        # It goes on, if it is served here: others come to it that have to be sent on.
        self._first_store = self._backend.store
        self._adopt(self._others[""], place, at)

    def _sent_to(self, at: tuple[str, int]) -> tuple[str, int]:
        """What the note says now: the one read first is old where the run has just moved again."""
        try:
            return _signpost.read(self._backend) or at
        except RendezvousConnectionError:
            return at

    def _run_at(self, at: tuple[str, int]) -> list | None:
        """What _tell_place has told there, if it stays."""
        store = _store_sockets.connect(at)
        try:
            self._others[""] = self._backend.at(store) if store else None
            is_there = store and not self._others[""].noted("leaves")
            return _read_place(self._others[""]) if is_there else None
        except RendezvousConnectionError:
            return None

    def _end_signpost(self) -> None:
        if self._signpost is not None:
            self._signpost.end()
            self._signpost = None

    def _adopt(self, backend, place: str, at: tuple[str, int]) -> None:
        """From now on this is the launchers' store."""
        self._end_signpost()
        opened = int(place.partition("/")[0] or "0")
        self._handler._stop_heartbeats()
        is_same, old = place == self.meetings.store, self._at
        with self._handler._heartbeat_lock:
            self._backend.move(backend.store, opened)
            self._handler._store = backend.store
            holder = self._handler._state_holder
            holder._token, holder._dirty, holder._last_sync_time = None, False, -1
        self.meetings.store, self._at = place, at
        self.is_server = backend is self._own
        if self._own is not None:  # its port is the store's, or its store ends here
            self._port, self._own = _store_sockets.Port(), None
        if self.is_server:
            self._signpost = _signpost.Signpost(backend, self._before, at)
            self._signpost.start()
        self._others, self._since_most = {}, None
        if is_same:
            say(f"the launchers' store at {_text(at)} answers again")
        else:
            say(
                f"the host of the launchers' store at {_text(old)} is gone; the run goes on with "
                f"the store at {_text(at)}. A host that joins needs --rdzv-endpoint={_text(at)} "
                "--rdzv-conf=is_host=0"
            )

    def _tell_place(self, backend, number: int, place: str) -> None:
        """The run is here, and has met so often."""
        backend.note("here", json.dumps([number, place, self._before]))

    def _end(self, what: str) -> None:
        """
        Raises:
            CutOffError: always.
        """
        size = len(self.meetings.last.hosts) if self.meetings.last else 0
        raise self._cut_off(
            f"the launchers' store was at {_text(self._at)}, and for {MOVE_SECONDS:.0f} s too few "
            f"of the {size} hosts of the last meeting {what}: it takes more than half, or half at "
            "the store of that meeting, as the others may go on without this host. Hint: where "
            "they do not, start again on hosts that live, with --rdzv-endpoint at one of them; "
            "training goes on from the newest snapshot."
        )

    def _cut_off(self, text: str) -> CutOffError:
        """What ends this launcher, and not the run of the others."""
        self._end_signpost()
        self._handler.shutdown = lambda: True
        return CutOffError(text)


class Departures:
    """Hosts that left a meeting in order, as those who stay have to know before their ranks miss
    the ones that end: such an end is no failure.

    The launchers' own state does not tell it from a host that gave no sign of life.
    """

    def __init__(self, standby: Standby) -> None:
        self._standby = standby

    def tell(self) -> None:
        """This host leaves the last meeting, and its store with it.

        Raises:
            RendezvousConnectionError: the store does not answer.
        """
        backend, meetings = self._standby._backend, self._standby.meetings
        if meetings.last is None:
            return
        backend.note(f"departure/{meetings.last.number}/{meetings.host}", "left")
        backend.note(f"departure/{meetings.last.number}", "left")
        backend.note(self._standby._gone(meetings.host), "left")
        if self._standby.is_on and self._standby.is_server:
            self._standby._end_signpost()
            backend.note("leaves", "now")

    def has_any(self) -> bool:
        """Whether a host has left the last meeting; False where the store does not answer."""
        last = self._standby.meetings.last
        try:
            return last is not None and bool(
                self._standby._backend.noted(f"departure/{last.number}")
            )
        except RendezvousConnectionError:
            return False


def _read_place(backend) -> list | None:
    """What _tell_place has told: how often the run has met, its store's name, where that was."""
    return json.loads(backend.noted("here") or "null")


def _text(place: tuple[str, int]) -> str:
    address, port = place
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
