"""torch's c10d rendezvous as `libddp run` uses it: nothing that a stranger writes runs as code.

The launchers of a run agree through one entry of a store, a pickle, that they read every few
seconds. torch's store asks nobody who they are, and torch unpickles what it finds: whoever reaches
the port of a torchrun launcher can run code in it. The state, its protocol and the store stay
torch's; three things differ here:

- An entry is unpickled only if it names nothing but the classes that a state is made of.
- With a run key an entry carries the key's seal and a number. One without the seal, an older one,
  and none where there was one, count as not written: the last good entry is put back.
- A run on one host listens at 127.0.0.1 only.

When the store's host is gone, the others meet at another one's (_standby.py).

    _rendezvous.prepare(args)      # torchrun's namespace, before torchrun.run(args)
"""

from __future__ import annotations

import hmac
import io
import os
import pickle
import socket
import sys
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from libddp import _standby
from libddp._run_key import has_key
from libddp._torch_patches import rendezvous_delays

#: In torch's registry of backends.
NAME = "c10d-of-libddp"
LOCAL_NAME = "c10d-of-libddp-on-one-host"
LOOPBACK = "127.0.0.1"
#: Names that mean this host, and for which an address that only this host reaches is right.
LOCAL_NAMES = ("localhost", LOOPBACK)
#: What a pickled state may name; see torch's _RendezvousState and _NodeDesc.
STATE_CLASSES = {
    (dynamic.__name__, "_RendezvousState"),
    (dynamic.__name__, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("builtins", "set"),
}
MAGIC = b"libddp-rendezvous-1"
TAG_BYTES = 32
NUMBER_BYTES = 8
MAX_ENTRY_BYTES = 16 << 20
#: Seconds between a launcher's signs of life, and how many may be missing.
HEARTBEATS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 4}
#: How long launchers wait for more than the smallest number, once there was a first start, and how
#: old what a launcher knows of the others may be. torch's are 30 s and 1 s. Hosts that stay are
#: all waiting when a meeting begins, and look several times within a last call.
LAST_CALL, KNOWN_FOR = 1.0, 1.0
#: Three looks of a launcher among few.
LOOKS_WITHIN = 0.3

_numbers: list[int] = []
_servers: list[TCPStore] = []


def prepare(args) -> None:
    """Puts libddp's backend in the place of torch's "c10d", and keeps one host to itself."""
    is_one_host = args.nnodes in ("1", "1:1")
    unnamed = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (is_one_host and unnamed):
        # As torchrun does it, with an address instead of a name that may mean two.
        args.standalone = False
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = f"{LOOPBACK}:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.rdzv_backend == "c10d":
        args.rdzv_conf = with_defaults(args.rdzv_conf)
        args.rdzv_endpoint, is_local = _endpoint(args, c10d.DEFAULT_PORT, is_one_host)
        if is_local and args.local_addr is None:
            args.local_addr = LOOPBACK  # MASTER_ADDR of the workers
        rendezvous_handler_registry.register(NAME, create_handler)
        rendezvous_handler_registry.register(LOCAL_NAME, create_local_handler)
        args.rdzv_backend = LOCAL_NAME if is_local else NAME
    elif args.rdzv_backend == "static" and is_one_host:
        args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        args.rdzv_endpoint, _ = _endpoint(args, -1, is_one_host)


def with_defaults(conf: str) -> str:
    """--rdzv-conf with what makes the launchers notice a dead one while its ranks are missed.

    Ranks are missed after 5 s; torch's 15 s would hold up every start until then.
    """
    given = {pair.partition("=")[0].strip() for pair in conf.split(",")}
    missing = [f"{key}={value}" for key, value in HEARTBEATS.items() if key not in given]
    return ",".join([conf] * bool(conf.strip()) + missing)


def _endpoint(args, default_port: int, is_one_host: bool) -> tuple[str, bool]:
    """The endpoint, and whether a server of ours listens at it, for this host alone.

    torch shares the server that a process has at a port, so this one becomes the store's.
    """
    endpoint = args.rdzv_endpoint
    if not is_one_host or "store_type=file" in args.rdzv_conf:
        return endpoint, False
    host, port = parse_rendezvous_endpoint(endpoint, default_port)
    if host not in LOCAL_NAMES or port < 0:
        return endpoint, False
    server = loopback_server(port)
    if server is None:
        return endpoint, False
    _servers.append(server)
    return f"{LOOPBACK}:{server.port}", True


def loopback_server(port: int) -> TCPStore | None:
    """None where the port is taken, or no 127.0.0.1 is: torch then does, or says, what it would."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError:
        listener.close()
        return None
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def create_handler(params):
    """The creator that torch's registry calls."""
    _, store = c10d.create_backend(params)
    backend = Backend(store, params.run_id, params.backend)
    handler = dynamic.create_handler(store, backend, params)
    rendezvous_delays.scale(params.max_nodes)
    rendezvous_delays.name_callers()
    share = rendezvous_delays.share(params.max_nodes)
    shorten_last_call(handler, backend, max(0.5, share) * LAST_CALL)
    handler._state_holder._cache_duration = share * KNOWN_FOR
    backend.looks_within = max(LOOKS_WITHIN, 1.5 * share * KNOWN_FOR)
    is_on = params.get_as_bool("store_moves", True) and params.max_nodes > 1
    handler.standby = _standby.Standby(handler, backend, is_on and isinstance(store, TCPStore))
    handler.next_rendezvous = lambda: _meet(handler.standby)
    handler.shutdown = handler.standby.shutdown
    handler.departures = handler.standby.departures
    return handler


def _meet(standby: _standby.Standby) -> RendezvousInfo:
    info = standby.meet()
    _numbers.append(standby.meetings.last.number)
    return info


def meeting() -> int | None:
    """The number of the last meeting, from 0; None where another rendezvous is used."""
    return _numbers[-1] if _numbers else None


def shorten_last_call(handler, backend: Backend, seconds: float) -> None:
    """torch waits 30 s for more hosts at every start, also where those of before are all there.

    A host that comes later than that is in the next start, as any host that joins. Of torch's
    settings only their class is changed, where it is the one that is known.
    """
    timeout = handler.settings.timeout
    if type(timeout) is not dynamic.RendezvousTimeout:
        return

    class Timeout(dynamic.RendezvousTimeout):
        @property
        def last_call(self) -> timedelta:
            usual = super().last_call
            return min(usual, timedelta(seconds=seconds)) if backend.round() > 0 else usual

    timeout.__class__ = Timeout


def create_local_handler(params):
    """As create_handler, where all workers are on this host."""
    handler = create_handler(params)
    everywhere = handler._create_tcp_store_server

    def create_server(address, port):
        """The store at MASTER_PORT of the workers."""
        return loopback_server(port) or everywhere(address, port)

    handler._create_tcp_store_server = create_server
    meet_nobody_again(handler)
    return handler


def meet_nobody_again(handler) -> None:
    """After the first meeting of a run on one host there is nobody to wait for.

    torch writes the meeting into the store, and looks there until it has settled: a tenth of a
    second and more, while all workers stand. And torch's workers count on a store of their own in
    each start, which its launcher gives them in the first one only: gloo's ranks then find the
    addresses of dead ones.
    """
    meet = handler.next_rendezvous
    first: list[RendezvousInfo] = []
    servers: list[TCPStore] = []

    def meet_again() -> RendezvousInfo:
        if not first or handler.is_closed() or not handler.use_agent_store:
            first[:] = [meet()]
            return first[0]
        [info] = first
        _numbers.append(_numbers[-1] + 1)
        store = PrefixStore(f"libddp/meeting/{_numbers[-1]}", info.store)
        address = info.bootstrap_store_info.master_addr
        # That of the start before stays: its workers may be about to end.
        servers[:] = [*servers[-1:], handler._create_tcp_store_server(address, 0)]
        own = RendezvousStoreInfo(master_addr=address, master_port=servers[-1].port)
        return RendezvousInfo(store, info.rank, info.world_size, own)

    handler.next_rendezvous = meet_again


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in STATE_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a rendezvous state")
        return super().find_class(module, name)


def _read(bits: bytes):
    return _StateUnpickler(io.BytesIO(bits)).load()


def is_state(bits: bytes) -> bool:
    """Whether torch may unpickle this."""
    try:
        state = _read(bits)
    except Exception:  # a stranger's bytes may raise anything
        return False
    fresh = dynamic._RendezvousState()
    return type(state) is type(fresh) and all(
        name in vars(state) and (value is None or isinstance(vars(state)[name], type(value)))
        for name, value in vars(fresh).items()
    )


def _first_number(meeting: int) -> int:
    """Of the entries of a store that was opened for that meeting: larger than all of before."""
    return meeting << 32


class Backend(c10d.C10dRendezvousBackend):
    """The entry of the store, believed only if it is ours."""

    def __init__(self, store, run_id: str, name: str = NAME) -> None:
        super().__init__(store, run_id)
        self._name = name
        self._run_id = run_id.encode()
        self._is_sealed = has_key()
        self._number = 0
        #: The newest entry that was good: its state and its text in the store.
        self._last: tuple[bytes, bytes] | None = None
        self._next_line = 0.0
        #: Seconds in which a launcher looks again.
        self.looks_within = LOOKS_WITHIN
        #: Called before each read; it may raise.
        self.before_read: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """The name that torch's registry knows."""
        return self._name

    def round(self) -> int:
        """How many meetings there have been, by the newest good entry."""
        return _read(self._last[0]).round if self._last else 0

    @property
    def store(self):
        """torch's."""
        return self._store

    @property
    def is_closed(self) -> bool:
        """Whether the run has ended, by the newest good entry."""
        return _read(self._last[0]).closed if self._last else False

    def at(self, store) -> Backend:
        """The same run's at another store."""
        return type(self)(store, self._run_id.decode(), self._name)

    def open(self, meeting: int) -> None:
        """At a fresh store: the next meeting there has this number."""
        state = dynamic._RendezvousState()
        state.round = meeting
        self._number = _first_number(meeting)
        self.set_state(pickle.dumps(state))

    def move(self, store, meeting: int) -> None:
        """To a store that was opened for that meeting, or 0: entries of before it are refused."""
        self._store, self._last, self._number = store, None, _first_number(meeting)

    def note(self, name: str, text: str) -> None:
        """Tells the other launchers something, with the key's seal."""
        self._call_store("set", f"{self._key}/{name}", self._note(name, text))

    def claim(self, name: str, text: str) -> None:
        """As note, unless that is noted already."""
        self._call_store("compare_set", f"{self._key}/{name}", "", self._note(name, text))

    def noted(self, name: str) -> str | None:
        """None: nothing; "": a stranger's."""
        key = f"{self._key}/{name}"
        if not self._call_store("check", [key]):
            return None
        entry = self._call_store("get", key).decode(errors="replace")
        text = entry.partition(" ")[2]
        return text if hmac.compare_digest(entry.encode(), self._note(name, text).encode()) else ""

    def are_noted(self, names) -> bool:
        """All of them, whoever wrote them."""
        return self._call_store("check", [f"{self._key}/{name}" for name in names])

    def _note(self, name: str, text: str) -> str:
        """What nobody without the key can write."""
        if not self._is_sealed:
            return f"- {text}"
        return f"{b64encode(self._tag(b'note', name.encode(), text.encode())).decode()} {text}"

    def get_state(self):
        """See base class. A read of an entry that somebody deleted would wait for it."""
        self.before_read()
        if self._last and not self._call_store("check", [self._key]):
            self._call_store("compare_set", self._key, "", self._last[1].decode())
        return super().get_state()

    def set_state(self, state, token=None):
        """See base class."""
        if token is not None and not isinstance(token, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        entry = b64encode(self._seal(state))
        expected = token.decode() if token else self._NULL_SENTINEL
        found = self._call_store("compare_set", self._key, expected, entry.decode())
        decoded = self._decode_state(found)
        return None if decoded is None else (*decoded, found == entry)

    def _decode_state(self, entry):
        """The state of an entry; for one that is not ours, the last good one, which is put back."""
        if entry == self._NULL_SENTINEL.encode() and self._last is None:
            return None
        state = self._open(entry)
        if state is not None:
            self._last = state, entry
        else:
            self._put_back(entry)
        return self._last and (self._as_seen(self._last[0]), self._last[1])

    def _as_seen(self, bits: bytes) -> bytes:
        """By torch, which decides by it whether a meeting has begun."""
        state = _read(bits)
        is_longer = rendezvous_delays.await_waiting(state, self.looks_within)
        return pickle.dumps(state) if is_longer else bits

    def _open(self, entry: bytes) -> bytes | None:
        if len(entry) > MAX_ENTRY_BYTES:
            return None
        try:
            bits = b64decode(entry, validate=True)
        except ValueError:
            return None
        if not self._is_sealed:
            return bits if is_state(bits) else None
        start = len(MAGIC) + TAG_BYTES
        numbered = bits[start:]
        number = int.from_bytes(numbered[:NUMBER_BYTES], "big")
        if not hmac.compare_digest(bits[:start], MAGIC + self._tag(numbered)):
            return None
        if number < self._number:
            return None  # of the past: somebody put it there again
        self._number = number
        return numbered[NUMBER_BYTES:]

    def _seal(self, state: bytes) -> bytes:
        if not self._is_sealed:
            return state
        numbered = (self._number + 1).to_bytes(NUMBER_BYTES, "big") + state
        return MAGIC + self._tag(numbered) + numbered

    def _tag(self, *parts: bytes) -> bytes:
        from libddp._load import load

        return load().run_key_tag([b"libddp rendezvous", self._run_id, *parts])

    def _put_back(self, entry: bytes) -> None:
        """What a stranger wrote goes, unless somebody was faster."""
        good = self._last[1].decode() if self._last else self._NULL_SENTINEL
        if entry.isascii():
            self._call_store("compare_set", self._key, entry.decode(), good)
        else:  # no text, which compare_set asks for
            self._call_store("set", self._key, good)
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + 1
        kind = "without the seal of the run key" if self._is_sealed else "that is no state"
        print(
            f"libddp run: pid={os.getpid()} event=rendezvous_entry_refused: an entry {kind} was in "
            "the launchers' store and is replaced; a stranger reaches its port, or a launcher of "
            "this run is no 'libddp run'" + (" with this key" if self._is_sealed else ""),
            file=sys.stderr,
            flush=True,
        )
