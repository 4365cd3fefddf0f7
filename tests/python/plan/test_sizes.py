"""Amounts of memory as people write them."""

import pytest
from libddp.errors import ArgumentError
from libddp.plan.sizes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("1.5g", 3 << 29), ("512 MiB", 512 << 20), ("2GB", 2 * 10**9), ("70", 70)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "eight", "8 XiB", "-1GiB", "0", "0.1B", "1e9", "nanGiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentError, match=r"no amount of memory\. Hint: .*8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "-"), (5, "5 B"), (1 << 20, "1.00 MiB"), (1010 << 20, "0.99 GiB"), (151 << 20, "151 MiB")],
)
def test_sizes_are_shown_with_three_digits(size, text):
    assert show_bytes(size) == text
