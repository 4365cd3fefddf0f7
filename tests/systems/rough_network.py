"""Several hosts joined by a wire that delays, loses, reorders, stalls and narrows, at will.

    with RoughNetwork(2) as net:                 # a Network of network.py; needs root
        ...                                      # starts as a perfect wire
        net.wire = Wire(delay=0.02, jitter=0.01, loss=0.01)
        net.stall(0.2)                           # nothing gets through for 200 ms
    net.forget_after = 3.0                   # a firewall drops connections that were idle so long

Each host's eth0 is a TUN device whose other end this process holds: a thread carries every packet
from one to the other, so the kernel's TCP sees what a bad network does, without netem.
"""

from __future__ import annotations

import dataclasses
import fcntl
import heapq
import math
import os
import random
import select
import struct
import threading
import time

import namespaces
from network import Network, ip

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
#: Small segments, so that every message comes in pieces.
MTU = 1200
#: What a capped wire keeps at most; more is dropped, as a switch does it.
QUEUE_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True)
class Wire:
    """Seconds, probabilities per packet, and bytes per second and host (0 = no cap)."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    rate: float = 0.0


def open_tun(namespace: str) -> int:
    """A new TUN device eth0 in a namespace; moves the calling thread there for good."""
    namespaces.enter_network(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", b"eth0", IFF_TUN | IFF_NO_PI))
    return tun


class RoughNetwork(Network):
    def __init__(self, num_hosts: int):
        super().__init__(num_hosts)
        self.wire = Wire()
        self.tuns: list[int] = []
        self.blocked_until = 0.0
        self.forget_after: float | None = None
        #: When each connection carried something last; forgotten ones are -inf.
        self.last_use: dict[frozenset, float] = {}
        self.is_over = False
        self.carrier: threading.Thread | None = None

    def __enter__(self) -> RoughNetwork:
        super().__enter__()
        try:
            self.carrier = threading.Thread(target=self.carry, daemon=True)
            self.carrier.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def plug(self, number: int, host: str) -> None:
        opener = threading.Thread(target=lambda: self.tuns.append(open_tun(host)))
        opener.start()
        opener.join()
        if len(self.tuns) != number + 1:
            raise OSError(f"no TUN device in {host}")
        ip("-n", host, "addr", "add", f"{self.addresses[number]}/{self.bits}", "dev", "eth0")
        ip("-n", host, "link", "set", "eth0", "mtu", str(MTU), "up")
        ip("-n", host, "link", "set", "lo", "up")

    def stall(self, seconds: float) -> None:
        self.blocked_until = time.monotonic() + seconds

    def carry(self) -> None:
        """The wire: packets wait in `queue` until their time has come."""
        dice = random.Random(5)
        queue: list[tuple[float, int, int, bytes]] = []
        free_at = [0.0] * len(self.tuns)
        number = 0
        while not self.is_over:
            now = time.monotonic()
            while queue and queue[0][0] <= now:
                _, _, target, packet = heapq.heappop(queue)
                self.deliver(target, packet)
            wait = min(0.05, queue[0][0] - now) if queue else 0.05
            for tun in select.select(self.tuns, [], [], max(0.0, wait))[0]:
                source = self.tuns.index(tun)
                for packet in self.take(tun):
                    arrival = self.arrival(source, len(packet), free_at, dice)
                    target = packet[19] - 1  # the last byte of the address in an IPv4 header
                    if arrival is None or packet[0] >> 4 != 4 or target >= len(self.tuns):
                        continue
                    if self.is_forgotten(packet):
                        continue
                    number += 1
                    heapq.heappush(queue, (arrival, number, self.tuns[target], packet))

    def is_forgotten(self, packet: bytes) -> bool:
        """What a stateful firewall says to the connection that an IPv4 packet belongs to."""
        if packet[9] != 6:  # TCP
            return False
        at = (packet[0] & 15) * 4
        source = packet[12:16] + packet[at : at + 2]
        connection = frozenset((source, packet[16:20] + packet[at + 2 : at + 4]))
        now = time.monotonic()
        idle = now - self.last_use.get(connection, now)
        if self.forget_after is not None and idle > self.forget_after:
            self.last_use[connection] = -math.inf
            return True
        self.last_use[connection] = now
        return False

    @staticmethod
    def take(tun: int) -> list[bytes]:
        packets = []
        try:
            while len(packets) < 64:
                packets.append(os.read(tun, 65536))
        except BlockingIOError:
            pass
        return packets

    @staticmethod
    def deliver(tun: int, packet: bytes) -> None:
        try:
            os.write(tun, packet)
        except OSError:
            pass  # a full queue drops packets on a real network too

    def arrival(self, source: int, size: int, free_at: list[float], dice) -> float | None:
        """When the packet comes out at the other end; None if it never does."""
        wire, now = self.wire, time.monotonic()
        if now < self.blocked_until or dice.random() < wire.loss:
            return None
        at = now
        if wire.rate > 0:
            begin = max(now, free_at[source])
            if (begin - now) * wire.rate > QUEUE_BYTES:
                return None
            at = free_at[source] = begin + size / wire.rate
        at += wire.delay + wire.jitter * dice.uniform(-1, 1)
        return at + 0.01 * (dice.random() < wire.reorder)

    def __exit__(self, *details) -> None:
        self.is_over = True
        if self.carrier and self.carrier.ident:
            self.carrier.join(10)
        for tun in self.tuns:
            os.close(tun)
        super().__exit__(*details)
