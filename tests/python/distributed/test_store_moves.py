"""Which meetings of launchers count, and what is said of a store that is gone; without hosts."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from libddp._meetings import Meeting, Meetings, are_enough
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from libddp import _hosts, _meetings, _rendezvous, _standby, _store_sockets

PLACE = {"place": ["10.0.0.1", 1]}
#: A meeting of a, b and c was the last one.
LAST = Meeting(4, "", {"a": ("h", 1), "b": ("h", 2), "c": ("h", 3)})


@pytest.fixture
def backend():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _rendezvous.Backend(store, "moving")


@pytest.mark.parametrize(
    ("votes", "store", "enough"),
    [
        ([None], "", True),  # nobody has met
        ([[4, "", 2]], "", True),  # half, at the store of that meeting
        ([[4, "", 2]], "5/b", False),  # half, elsewhere
        ([[4, "", 3]], "", False),
        ([[4, "", 3]] * 2, "", True),
        ([[4, "", 3]] * 2, "5/b", True),
        ([[4, "", 3], None, None], "5/b", False),  # hosts that come are no half of the last ones
        ([[4, "", 4], [4, "", 2]], "", True),  # one knows that two have left in order
        ([[4, "", 2], [5, "5/b", 3]], "", False),  # one was in a later meeting elsewhere
        ([[5, "5/b", 2]], "5/b", True),
    ],
)
def test_enough_hosts_are_more_than_half_or_half_with_the_store(votes, store, enough):
    assert are_enough([{"last": vote} for vote in votes], store) == enough


def hosts_of(names: str, last=LAST) -> list[Meetings]:
    return [Meetings(name, last=last) for name in names]


def settle(backend, everyone, number: int) -> list:
    """All put down their cards; what each one gets."""
    with ThreadPoolExecutor(len(everyone)) as pool:
        return list(
            pool.map(
                lambda each: everyone[each].settle(backend, number, each, len(everyone), {**PLACE}),
                range(len(everyone)),
            )
        )


def test_a_meeting_counts_when_all_have_put_their_cards_down(backend):
    everyone = hosts_of("ab")
    one, other = settle(backend, everyone, 5)
    assert [card["host"] for card in one] == ["a", "b"]
    assert one == other
    assert {each.id for each in everyone} == {"5@"}
    assert not everyone[0].in_doubt
    assert everyone[0].others() == ["b"]


def test_one_of_three_does_not_go_on_alone(backend):
    (lone,) = hosts_of("a")
    assert settle(backend, [lone], 5) == [None]
    assert (lone.last, lone.in_doubt) == (LAST, False)
    for host in ("b", "c"):
        backend.note(f"departure/4/{host}", "left")
    backend.note("departure/4", "left")
    assert settle(backend, [lone], 6)[0], "the others have left in order"


def test_a_card_that_does_not_come_in_time_never_does(backend, monkeypatch):
    monkeypatch.setattr(_meetings, "CARD_SECONDS", 0.2)
    early, late = hosts_of("ab")
    assert early.settle(backend, 5, 0, 2, {**PLACE}) is None
    monkeypatch.setattr(_meetings, "CARD_SECONDS", 600)
    assert late.settle(backend, 5, 1, 2, {**PLACE}) is None
    assert all(each.last == LAST and not each.in_doubt for each in (early, late))
    assert all(settle(backend, [early, late], 6))


class Gone(Exception):
    """The store's host is."""


def lose_after_the_card(backend, meetings: Meetings, number: int, size: int) -> None:
    def be_gone(_):
        raise Gone

    backend.are_noted = be_gone
    with pytest.raises(Gone):
        meetings.settle(backend, number, 0, size, {**PLACE})
    del backend.are_noted


def test_who_does_not_know_whether_a_meeting_counts_is_counted_nowhere_else(backend):
    doubtful, other = hosts_of("ab")
    lose_after_the_card(backend, doubtful, 5, 2)
    assert doubtful.in_doubt
    elsewhere = backend.at(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    doubtful.store = other.store = "5/b"
    assert settle(elsewhere, [doubtful, other], 5) == [None, None], "one of three, and a doubtful"
    assert doubtful.in_doubt
    third = hosts_of("c")[0]
    third.store = "5/b"
    assert all(settle(elsewhere, [doubtful, other, third], 6))
    assert not doubtful.in_doubt
    assert doubtful.id == "6@5/b"


def test_back_at_the_store_the_cards_tell(backend):
    doubtful, other = hosts_of("ab")
    lose_after_the_card(backend, doubtful, 5, 2)
    assert other.settle(backend, 5, 1, 2, {**PLACE})
    assert all(settle(backend, [doubtful, other], 6))
    assert [each.id for each in (doubtful, other)] == ["6@", "6@"]


def test_notes_of_others_without_the_key_are_not_believed(backend):
    other = backend.at(backend.store)
    for each in (backend, other):
        each._is_sealed = True
        each._tag = lambda *parts: b"key of the run, " + b"/".join(parts)
    backend.note("here", '[4, ""]')
    assert other.noted("here") == '[4, ""]'
    for forged in ("", '- [9, ""]', backend._note("gone", '[9, ""]'), "\u00fc " * 3):
        backend.store.set(f"{backend._key}/here", forged)
        assert other.noted("here") == "", forged
    assert other.noted("nothing") is None


def test_entries_of_before_a_move_are_refused_after_it(backend):
    backend._is_sealed = True
    backend._tag = lambda *parts: b"32 bytes of a tag for this test."
    backend.open(3)
    old = backend._last[1]
    backend.move(backend.store, 4)
    assert backend._open(old) is None
    backend.move(backend.store, 3)
    assert backend._open(old) is not None


def test_a_port_refuses_until_a_store_is_served():
    port = _store_sockets.Port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number), 30)
    assert _store_sockets.connect(("127.0.0.1", port.number)) is None
    server = port.serve()
    client = _store_sockets.connect(("127.0.0.1", port.number))
    client.set("key", "value")
    assert server.get("key") == b"value"
    assert _store_sockets.is_served_here(server)
    limits = [
        each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        for each in _store_sockets._sockets()
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and each.getpeername()[1] == port.number
    ]
    assert 1000 * _store_sockets.GONE_SECONDS in limits
    del server
    with pytest.raises(RuntimeError):
        client.get("key")


def standby_of(backend, last=LAST) -> _standby.Standby:
    """Of host a, whose meetings are not torch's."""
    handler = SimpleNamespace(
        next_rendezvous=None,
        shutdown=lambda: True,
        _get_world=None,
        _this_node="a",
        num_nodes_waiting=None,
    )
    standby = _standby.Standby(handler, backend, is_on=True)
    standby.meetings.host, standby.meetings.last = "a", last
    return standby


def test_a_host_that_leaves_in_order_is_known_to_have(backend):
    stays, leaves = standby_of(backend), standby_of(backend)
    leaves.meetings.host = "b"
    leaves.is_server = False
    assert not stays.departures.has_any()
    leaves.departures.tell()
    assert stays.departures.has_any()
    assert not stays._is_left_by_server()
    leaves.is_server = True
    leaves.departures.tell()
    assert stays._is_left_by_server()
    stays.meetings.last = Meeting(5, "", LAST.hosts)
    assert not stays.departures.has_any(), "that was another meeting"
    backend._call_store = refuse
    assert not stays.departures.has_any()
    stays.meetings.last = None
    assert not stays.departures.has_any(), "there was no meeting yet"
    stays.departures.tell()


def refuse(*_):
    raise RendezvousConnectionError("no store")


def test_a_lost_store_of_a_run_that_has_ended_moves_nobody(backend):
    """Nor of one that has never begun."""
    standby = standby_of(backend)
    error = RendezvousConnectionError()
    assert not standby.is_lost(error), "it answers"
    backend._call_store = refuse
    assert standby.is_lost(error)
    assert not standby_of(backend, last=None).is_lost(error)

    class Handler:
        standby = None

        def num_nodes_waiting(self):
            raise RendezvousConnectionError

    handler = Handler()
    handler.standby = standby
    assert _hosts.Hosts(unit=2)._num_waiting(handler) == 2, "all meet again"
    closed = _rendezvous.dynamic._RendezvousState()
    closed.closed = True
    backend._last = _rendezvous.pickle.dumps(closed), b""
    assert _hosts.Hosts()._num_waiting(handler) == 0, "the workers go on to their end"
    with pytest.raises(RendezvousClosedError):
        standby.is_lost(error)


def test_the_launcher_with_the_store_ends_after_the_others(backend, monkeypatch):
    first, second, third = (standby_of(backend) for _ in range(3))
    second.meetings.host, third.meetings.host = "b", "c"
    second.is_server = third.is_server = False
    second.shutdown()
    waiting = threading.Thread(target=first.shutdown, daemon=True)
    monkeypatch.setattr(_standby, "LINGER_SECONDS", 600)
    waiting.start()
    time.sleep(0.5)
    assert waiting.is_alive()
    third.departures.tell()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_run_that_moves_again_is_found_where_it_has_moved_to(backend, monkeypatch):
    """The launcher that is sent to it has read the first note, a moment too early."""
    standby, tried = standby_of(backend, last=None), []

    def run_at(place):
        tried.append(place)
        backend.note("moved", json.dumps(["10.0.0.2", 2]))
        return [0, "1/b", []] if place == ("10.0.0.2", 2) else None

    adopted = []
    monkeypatch.setattr(standby, "_run_at", run_at)
    monkeypatch.setattr(standby, "_adopt", lambda _, place, at: adopted.append((place, at)))
    monkeypatch.setattr(_standby, "_LOOK_SECONDS", 0.01)
    standby._others[""] = backend
    standby._go_to_run(("10.0.0.1", 1))
    assert tried == [("10.0.0.1", 1), ("10.0.0.2", 2)]
    assert adopted == [("1/b", ("10.0.0.2", 2))]
    # The store with the note may go meanwhile.
    backend._call_store = refuse
    assert standby._sent_to(("10.0.0.3", 3)) == ("10.0.0.3", 3)
