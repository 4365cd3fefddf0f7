"""Many small checks in one launch of ranks: each is a function `check_*` of the test file.

def check_sum():                    # runs on every rank, in the order of the file
    assert add(1, 2) == 3

def run_all():
    return checks.run(globals())

results = checks.fixture(run_all, world_size=2)

@pytest.mark.parametrize("name", checks.names(globals()))
def test_on_every_rank(results, name):
    checks.verify(results, name)
"""

from __future__ import annotations

import traceback

import pytest
import ranks

PREFIX = "check_"


def names(namespace: dict) -> list[str]:
    return [name.removeprefix(PREFIX) for name in namespace if name.startswith(PREFIX)]


def run(namespace: dict) -> dict[str, str | None]:
    """On a rank: runs the checks; None for one that passed, its traceback for one that did not."""
    results: dict[str, str | None] = {}
    for name in names(namespace):
        try:
            namespace[PREFIX + name]()
            results[name] = None
        except (Exception, pytest.fail.Exception):  # the latter: pytest.raises saw nothing
            results[name] = traceback.format_exc()
    return results


def fixture(function, world_size: int, deadline: float = 180.0):
    """Fixture of module scope: one launch for all tests of the file."""

    @pytest.fixture(scope="module")
    def results():
        return ranks.run(function, world_size, deadline=deadline)

    return results


def verify(results: list[dict], name: str) -> None:
    failed = {rank: found[name] for rank, found in enumerate(results) if found[name] is not None}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
