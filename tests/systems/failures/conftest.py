"""The cases on one host need no namespaces; those of several hosts skip without."""

import contextlib

import network
import pytest

from failures.bench import open_bench


@pytest.fixture(scope="session", autouse=True)
def namespaces():
    """In place of the one that skips everything."""


@pytest.fixture(scope="session")
def benches():
    """By number of hosts, each opened when the first case needs it."""
    with contextlib.ExitStack() as stack:
        opened = {}

        def get(num_hosts: int):
            if num_hosts > 1 and network.why_not():
                pytest.skip(f"no network namespaces here: {network.why_not()}")
            if num_hosts not in opened:
                opened[num_hosts] = open_bench(stack, num_hosts)
            return opened[num_hosts]

        yield get
