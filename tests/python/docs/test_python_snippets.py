"""Every Python snippet in README.md and docs runs as it is printed."""

from pathlib import Path

import pytest
import snippets
from launches import finish, launch, ranks

RUNNER = Path(__file__).with_name("snippet_rank.py")


def wanted(page: str, is_alone: bool) -> list[str]:
    """What the runner prints of those that run to their end."""
    found = [s for s in snippets.of(page, "python") if not s.reason]
    return [f"ran {s.place}" for s in found if ("alone" in s.words) == is_alone]


def run(page: str, folder: Path, *launcher: str) -> list[str]:
    [(status, output)] = finish(launch([*launcher, RUNNER, page], folder), deadline=180)
    assert status == 0, output
    return [line for line in output.splitlines() if line.startswith("ran ")]


@pytest.mark.parametrize("page", [p for p in snippets.PAGES if wanted(p, is_alone=False)])
def test_on_two_ranks(page, tmp_path):
    assert sorted(run(page, tmp_path, *ranks(2))) == sorted(2 * wanted(page, is_alone=False))


@pytest.mark.parametrize("page", [p for p in snippets.PAGES if wanted(p, is_alone=True)])
def test_in_one_process(page, tmp_path):
    assert run(page, tmp_path) == wanted(page, is_alone=True)
