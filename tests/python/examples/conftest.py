"""Makes the modules of examples/nanogpt importable, as they are for its scripts."""

import sys
from pathlib import Path

import pytest

NANOGPT = Path(__file__).parents[3] / "examples" / "nanogpt"
sys.path.insert(0, str(NANOGPT))


@pytest.fixture
def text_file(tmp_path):
    """A small text that a network can learn something from."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 200, encoding="utf-8")
    return path
