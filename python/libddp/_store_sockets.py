"""Connections of torch's store: a server whose host is gone is noticed, and ports kept for one.

    port = Port()                          # nobody can connect yet
    server = port.serve()                  # a store there
    store = connect(("10.0.0.2", 29411))   # None: nobody serves there

torch's client waits for an answer as long as TCP does, a quarter of an hour. It names no
descriptor, so the connections of a store are found by its port.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import TCPStore

#: A host that acknowledges nothing for so long is gone. Its ranks are missed after the same time.
GONE_SECONDS = 5
_CONNECT_SECONDS = 0.5
#: For the store behind a port at which somebody listens.
_GREET_SECONDS = 5
_READ_SECONDS = 60
_BACKLOG = 128
_LOOPBACK = "127.0.0.1"


class Port:
    """A port that is ours; who connects is refused until a store is there."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
        try:
            self._bind()
        except OSError:  # no IPv6 here
            self._socket.close()
            self._socket = socket.socket()
            self._socket.bind(("", 0))
        self.number = self._socket.getsockname()[1]

    def _bind(self) -> None:
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", 0))

    def serve(self) -> TCPStore:
        """A store on all interfaces, as torch's; it ends with the object."""
        self._socket.listen(_BACKLOG)
        return TCPStore(
            _LOOPBACK,
            self.number,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_READ_SECONDS),
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> None:
        self._socket.close()


def connect(place: tuple[str, int]) -> TCPStore | None:
    """A client of the store there."""
    try:
        socket.create_connection(place, _CONNECT_SECONDS).close()
        greet = timedelta(seconds=_GREET_SECONDS)
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=greet)
    except (OSError, RuntimeError):
        return None
    store.set_timeout(timedelta(seconds=_READ_SECONDS))
    notice_loss(store)
    return store


def notice_loss(store: TCPStore) -> None:
    """What waits for the store's host ends with an error once that is gone."""
    for each in _sockets():
        with contextlib.suppress(OSError):
            if each.getpeername()[1] == store.port:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_SECONDS)
                milliseconds = 1000 * GONE_SECONDS
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def is_served_here(store: TCPStore) -> bool:
    """Whether the server is in this process."""
    for each in _sockets():
        with contextlib.suppress(OSError):
            listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and each.getsockname()[1] == store.port:
                return True
    return False


def _sockets() -> Iterator[socket.socket]:
    """Copies of all of this process's, but for Unix sockets."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6):
                        yield each
