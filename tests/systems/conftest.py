"""Tests of whole systems: several hosts as network namespaces. They need root and skip without."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python" / "support")]

import network  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def namespaces():
    """Skips every test here, with the reason, where namespaces cannot be made."""
    reason = network.why_not()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
