"""Many collectives and many groups leave descriptors, threads and memory as they were."""

import contextlib
import os

import pytest

from failures import soak
from failures.bench import open_bench
from failures.case import VARIABLE

IS_LONG = os.environ.get(VARIABLE) == "full"
HOSTS = [0, 0, 0, 0]


@pytest.fixture(scope="module")
def bench():
    with contextlib.ExitStack() as stack:
        yield open_bench(stack, 1, env=soak.ENVIRONMENT)


def test_mixed_collectives_of_several_groups_and_threads(bench):
    for samples in soak.collectives(bench.fleet, HOSTS, 100_000 if IS_LONG else 4000):
        assert not soak.check(samples, "collectives"), samples
    bench.require_nothing_left()


def test_groups_that_come_and_go(bench):
    for samples in soak.lives(bench.fleet, HOSTS[:3], 100 if IS_LONG else 20):
        assert not soak.check(samples, "lives"), samples
    bench.require_nothing_left()
