"""Opens what the cases work with."""

from __future__ import annotations

import network

from failures.case import Bench
from failures.fleet import Fleet


def open_bench(stack, num_hosts: int, seed: int | None = None, env: dict | None = None) -> Bench:
    """In namespaces of its own, where sockets can be counted; one host also without root."""
    hosts = None
    if num_hosts > 1 or not network.why_not():
        hosts = stack.enter_context(network.Network(num_hosts))
    fleet = stack.enter_context(Fleet(hosts, env=env))
    return Bench(fleet, hosts, seed)
