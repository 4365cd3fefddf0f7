"""Many small checks in one launch of ranks: each is a function `check_*` of the test file.

def check_sum():                    # runs on every rank, in the order of the file
    assert add(1, 2) == 3

def run_all():
    return checks.run(globals())

results = checks.fixture(run_all, world_size=2)

@pytest.mark.parametrize("name", checks.names(globals()))
def test_on_every_rank(results, name):
    checks.verify(results, name)

or, where the checks want a process group and nothing else,

results, test_on_all_ranks = checks.suite(globals(), 2)
"""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist

PREFIX = "check_"
#: Made by shared_folder.
folders: list[Path] = []


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


def suite(
    namespace: dict,
    *world_sizes: int,
    backend: str = "libddp",
    begin=None,
    apart: bool = False,
):
    """(fixture, test) of a file whose checks run inside a group, for each number of ranks.

    `begin()` makes the group where init_process_group(backend) does not. `apart`: all of it once
    more, with each rank on a host of its own.
    """
    import group_checks

    kinds = [f"{size}-ranks" for size in world_sizes]
    kinds += [f"{size}-hosts" for size in world_sizes if apart]

    @pytest.fixture(scope="module", params=kinds)
    def results(request):
        size, kind = request.param.split("-")
        path = namespace["__file__"]
        how = begin.__name__ if begin else backend
        arguments = (path, how, kind == "hosts")
        return ranks.run(group_checks.run, int(size), *arguments, deadline=180.0)

    @pytest.mark.parametrize("name", names(namespace))
    def test(results, name):
        verify(results, name)

    return results, test


def shared_folder() -> Path:
    """On all ranks of a suite: one that they share and that is removed in the end."""
    holder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(holder, src=0)
    folders.append(Path(holder[0]))
    return folders[-1]


def verify(results: list[dict], name: str) -> None:
    failed = {rank: found[name] for rank, found in enumerate(results) if found[name] is not None}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
