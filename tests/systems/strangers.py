"""A crowd on the network that belongs to no run: idle, half-open and talking nonsense.

    with Crowd(net, 2, [0, 1], folder, idle=2000, garbage=300) as crowd:
        ...                          # every port that listens on hosts 0 and 1 is visited

Run as a program it is the crowd itself, on the host whose namespace it was started in.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

#: state LISTEN in /proc/net/tcp
LISTENS = "0A"
NONSENSE = (
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    b"1ddl" + b"\x02\x00\x00\x00" + b"\xff" * 48,
    b"1ddl" + b"\x09\x00\x00\x00",
    b"\xff" * 4096,
    b"",
)


def listening_ports(net, host: int) -> list[int]:
    """Ports of one host's namespace that anything listens on."""
    table = subprocess.run(
        [*net.inside(host), "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    rows = [line.split() for line in table.stdout.splitlines()]
    return sorted({int(row[1].split(":")[1], 16) for row in rows if row[3:4] == [LISTENS]})


def replace_text(path: Path, text: str) -> None:
    """Whoever reads at the same time gets the one or the other."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


class Crowd:
    """`idle` connections per port that say nothing, `garbage` new ones a second that do."""

    def __init__(self, net, home: int, visited: list[int], folder, *, idle: int, garbage: int):
        self.net, self.visited = net, visited
        self.targets = Path(folder) / "targets.json"
        self.report = Path(folder) / "crowd.json"
        self.command = [*net.inside(home), sys.executable, __file__]
        self.command += [str(self.targets), str(self.report), str(idle), str(garbage)]
        self.is_over = threading.Event()

    def __enter__(self) -> Crowd:
        self.targets.write_text("[]")
        self.child = subprocess.Popen(self.command, stdin=subprocess.PIPE)
        self.scout = threading.Thread(target=self.look_for_ports)
        self.scout.start()
        return self

    def look_for_ports(self) -> None:
        while not self.is_over.wait(0.05):
            found = [
                [self.net.addresses[host], port]
                for host in self.visited
                for port in listening_ports(self.net, host)
            ]
            replace_text(self.targets, json.dumps(found))

    def __exit__(self, *_) -> None:
        self.is_over.set()
        self.scout.join()
        self.child.stdin.close()  # it leaves, and closes all it has
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait(20)

    def visits(self) -> dict:
        """Connections made so far, by port."""
        return json.loads(self.report.read_text())


class Visitor:
    def __init__(self, targets: str, report: str, idle: str, garbage: str):
        self.targets, self.report = Path(targets), Path(report)
        self.num_idle, self.garbage_period = int(idle), 1 / max(1, int(garbage))
        self.idle: dict[tuple, list] = {}
        self.talking: deque = deque()
        self.made: dict[str, int] = {}

    def connect(self, address, port) -> socket.socket | None:
        visitor = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        visitor.settimeout(0.2)
        try:
            visitor.connect((address, port))
        except OSError:
            visitor.close()
            return None
        key = f"{address}:{port}"
        self.made[key] = self.made.get(key, 0) + 1
        return visitor

    def sit(self, target) -> None:
        """Up to fifty more that say nothing."""
        sitting = self.idle.setdefault(tuple(target), [])
        for _ in range(min(50, self.num_idle - len(sitting))):
            visitor = self.connect(*target)
            if visitor is None:
                return
            sitting.append(visitor)

    def talk(self, target) -> None:
        visitor = self.connect(*target)
        if visitor is None:
            return
        with contextlib.suppress(OSError):
            visitor.sendall(random.choice(NONSENSE))
        self.talking.append(visitor)
        if len(self.talking) > 200:
            self.talking.popleft().close()

    def run(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        os.set_blocking(0, False)
        next_talk = time.monotonic()
        while not self.is_told_to_leave():
            targets = json.loads(self.targets.read_text())
            gone = [key for key in self.idle if list(key) not in targets]
            for key in gone:
                for visitor in self.idle.pop(key):
                    visitor.close()
            for target in targets:
                self.sit(target)
            while targets and next_talk < time.monotonic():
                self.talk(random.choice(targets))
                next_talk = max(next_talk + self.garbage_period, time.monotonic() - 1)
            replace_text(self.report, json.dumps(self.made))
            time.sleep(0.005)

    @staticmethod
    def is_told_to_leave() -> bool:
        try:
            return os.read(0, 1) == b""
        except BlockingIOError:
            return False


if __name__ == "__main__":
    Visitor(*sys.argv[1:]).run()
