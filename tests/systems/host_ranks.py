"""Runs a function of a test file on ranks of several hosts (network.py), as ranks.py on one.

def work():                                   # at the top level of the test file
    init_process_group("gloo")
    ...

with Network(2) as net:
    outcomes = launch(net, [0, 0, 1], work)   # host of each rank
"""

from __future__ import annotations

import ranks

#: A namespace has all ports to itself.
PORT = 29500


def launch(net, host_of, function, *args, deadline=150.0, env=None, on_start=None, anew=False):
    """Outcomes of all ranks. `env(rank)` adds variables; `on_start(folder)` runs beside them;
    `anew`: each in a fresh interpreter, whose command line and environment are its own."""

    def start(folder: str, rank: int):
        host = host_of[rank]
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(host_of[:rank].count(host)),
            "WORLD_SIZE": str(len(host_of)),
            "LOCAL_WORLD_SIZE": str(host_of.count(host)),
            "MASTER_ADDR": net.addresses[host_of[0]],
            "MASTER_PORT": str(PORT),
        }
        own = env(rank) if env else {}
        return ranks.fork(folder, place, own, namespace=net.hosts[host], anew=anew)

    return ranks.supervise(start, len(host_of), function, args, deadline, on_start)


def run(net, host_of, function, *args, **options) -> list:
    """As `launch`, but returns the values and raises if a rank failed."""
    return ranks.values(launch(net, host_of, function, *args, **options))
