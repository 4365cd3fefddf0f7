"""Which meetings of the launchers count, so that a run that is torn apart goes on once.

torch's rendezvous is over for a host as soon as it reads so in the store. Here a meeting counts
when each of its hosts has put its card into the store and read all others', and enough of the last
one's hosts are among them. Cards also tell where the workers' store is, and where each host would
have the launchers' (_standby.py).

    meetings = Meetings("host-a")
    cards = meetings.settle(backend, number, rank, world_size, {"place": ["10.0.0.2", 29411]})

NOTE [One successor]
Of the hosts of a meeting more than half are enough, or half at the store where it was. A run that
is torn apart would need two successors of one meeting, at different stores. These would have a host
of it in common, as half and more than half are more than all, whose cards in both would name that
meeting. But a card names the last meeting of its host that counted, and a host that has put down
its card for one successor names another one, or none, in the next:
- It has read all cards, and they are enough: the new meeting is its last one.
- It has read all, and they are not enough: that one counts for nobody.
- The store was gone before: it is in doubt, and its cards name none until it has been in a meeting
  that counts, or is back at that store, where the cards tell.
- It has waited too long for a card: it puts an empty one there, which its owner finds when it
  comes, or it finds that the card is there by now. So at one store all come to the same answer.
Hosts that have left in order are in neither half.

Thread rule: the launcher's first thread.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

#: For the cards of the others: all of them have seen each other alive within a few seconds.
CARD_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_MOST_LOOKS = 10


@dataclass(frozen=True)
class Meeting:
    """One that counted."""

    number: int
    #: Where it was; "" is the store of --rdzv-endpoint.
    store: str
    #: Address and port at which each host would have the store; by rank.
    hosts: dict[str, tuple[str, int]]


@dataclass
class Meetings:
    """Those of one launcher."""

    #: This host, by a name that no other process has.
    host: str
    #: False: all meetings count.
    are_counted: bool = True
    last: Meeting | None = None
    #: Where this launcher is now.
    store: str = ""
    #: Hosts of the last meeting that have left in order, as far as this one knows.
    departed: set[str] = field(default_factory=set)
    #: Number, store and cards' names of a meeting, if this host does not know whether it counts.
    _doubt: tuple[int, str, list[str]] | None = None

    @property
    def in_doubt(self) -> bool:
        return self._doubt is not None

    @property
    def id(self) -> str:
        """Of the last one."""
        return f"{self.last.number}@{self.last.store}" if self.last else ""

    def others(self) -> list[str]:
        """Of the last meeting, without those that have left in order."""
        if self.last is None:
            return []
        return [host for host in self.last.hosts if host not in {self.host, *self.departed}]

    def settle(self, backend, number: int, rank: int, size: int, card: dict) -> list[dict] | None:
        """The cards by rank of a meeting; None: it does not count, and the hosts meet again.

        Raises:
            RendezvousConnectionError: the store does not answer.
        """
        if self._doubt and self._doubt[1] == self.store:
            self._conclude(*self._doubt, _await_cards(backend, self._doubt[2]))
            self._doubt = None
        names = [f"card/{number}/{each}" for each in range(size)]
        card |= {"host": self.host, "last": self._vote(backend)}
        is_first_doubt = self._doubt is None
        if is_first_doubt:
            self._doubt = number, self.store, names
        backend.claim(names[rank], json.dumps(card))
        cards = self._conclude(number, self.store, names, _await_cards(backend, names))
        if is_first_doubt or cards:
            self._doubt = None
        return cards

    def look_for_departed(self, backend) -> None:
        """Notes of those that have left in order since the last meeting."""
        if self.last is None or self.last.store != self.store:
            return
        note = f"departure/{self.last.number}"
        if backend.noted(note):
            self.departed |= {h for h in self.others() if backend.noted(f"{note}/{h}")}

    def _vote(self, backend) -> list | None:
        """What a card says of its host's last meeting: its number, its store, its hosts."""
        if self._doubt or self.last is None:
            return None
        self.look_for_departed(backend)
        return [self.last.number, self.last.store, len(self.last.hosts) - len(self.departed)]

    def _conclude(self, number: int, store: str, _names, cards) -> list[dict] | None:
        if cards is None or (self.are_counted and not are_enough(cards, store)):
            return None
        hosts = {card["host"]: tuple(card["place"]) for card in cards}
        self.last, self.departed = Meeting(number, store, hosts), set()
        return cards


def are_enough(cards: list[dict], store: str) -> bool:
    """Whether a meeting with these cards at this store is the one successor of the last."""
    votes = [card["last"] for card in cards if card["last"]]
    if not votes:
        return True  # nobody has met before
    newest = max((number, place) for number, place, _ in votes)
    sizes = [size for number, place, size in votes if (number, place) == newest]
    return is_most(len(sizes), min(sizes), is_home=newest[1] == store)


def is_most(num_here: int, size: int, is_home: bool) -> bool:
    """More than half, or half where their store is."""
    return 2 * num_here > size or (is_home and 2 * num_here == size)


def _await_cards(backend, names: list[str]) -> list[dict] | None:
    """None: there is one that will never come."""
    limit = time.monotonic() + CARD_SECONDS
    while not backend.are_noted(names):
        if time.monotonic() > limit:
            for name in names:
                backend.claim(name, "")
        time.sleep(_LOOK_SECONDS * min(_MOST_LOOKS, len(names)))
    texts = [backend.noted(name) for name in names]
    return [json.loads(text) for text in texts] if all(texts) else None
