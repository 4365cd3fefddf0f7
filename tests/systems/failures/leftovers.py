"""Looks for what ranks may leave behind: processes, shared memory, sockets, temporary files.

before = look(server.pid, namespaces, folder, store_port)
...
assert not look(server.pid, namespaces, folder, store_port).beyond(before)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import namespaces

#: TCP states of connections that only wait for their own end (TIME_WAIT, CLOSE and the like).
ENDING = {"04", "05", "06", "07", "08", "09", "0B"}


@dataclass
class Remains:
    processes: frozenset[int]
    files: frozenset[str]
    #: Listening or connected, by network namespace and inode.
    sockets: frozenset[str]

    def beyond(self, before: Remains) -> list[str]:
        """What was not there before."""
        return [
            *(f"process {pid}" for pid in self.processes - before.processes),
            *sorted(self.files - before.files),
            *sorted(self.sockets - before.sockets),
        ]


def look(parent: int, hosts: list[str | None], temporary: Path, store_port: int) -> Remains:
    """`hosts`: network namespaces, None for this process's; `store_port`: connections of torch's
    store, which keeps those of lost hosts for long."""
    files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "libddp" in name}
    files |= {str(path) for path in temporary.rglob("*")}
    sockets = {s for host in hosts for s in (*tcp_sockets(host, store_port), *unix_sockets(host))}
    return Remains(frozenset(children_of(parent)), frozenset(files), frozenset(sockets))


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def tcp_sockets(host: str | None, store_port: int):
    """Those that somebody still holds."""
    for family in ("tcp", "tcp6"):
        for line in namespaces.read(host, f"net/{family}").splitlines()[1:]:
            fields = line.split()
            inode = fields[9]
            ports = {int(fields[i].rpartition(":")[2], 16) for i in (1, 2)}
            if fields[3] not in ENDING and inode != "0" and store_port not in ports:
                yield f"{family} socket {fields[1]}-{fields[2]} inode {inode}"


def unix_sockets(host: str | None):
    for line in namespaces.read(host, "net/unix").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and "libddp" in fields[7]:
            yield f"unix socket {fields[7]} inode {fields[6]}"
