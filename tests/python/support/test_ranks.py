"""The helper itself: values, errors, and a rank that never ends."""

import os
import time

import pytest
import ranks


def add(number):
    return int(os.environ["RANK"]) + number


def fail_or_hang(seconds):
    if os.environ["RANK"] == "0":
        raise ValueError("no such thing")
    time.sleep(seconds)


def test_values_come_back_in_rank_order():
    assert ranks.run(add, 2, 10) == [10, 11]


def test_an_error_and_a_hang_are_told_apart_and_end_at_the_deadline():
    started = time.monotonic()
    first, second = ranks.launch(fail_or_hang, 2, 600, deadline=3)
    assert time.monotonic() - started < 60
    assert (first.error, first.message, first.timed_out) == ("ValueError", "no such thing", False)
    assert "ValueError" in first.bases
    assert "Exception" in first.bases
    assert second.timed_out


def test_run_raises_with_the_rank_and_its_error():
    with pytest.raises(ranks.RanksError, match=r"rank 0: .*no such thing"):
        ranks.run(fail_or_hang, 1, 0)
