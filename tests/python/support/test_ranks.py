"""The helper itself: values, errors, and a rank that never ends."""

import os
import time

import pytest
import ranks


def add(number):
    return int(os.environ["RANK"]) + number


def fail():
    raise ValueError("no such thing")


def hang():
    time.sleep(600)


def test_values_come_back_in_rank_order():
    assert ranks.run(add, 2, 10) == [10, 11]


def test_an_error_comes_back_with_its_class_and_text():
    (outcome,) = ranks.launch(fail, 1)
    assert (outcome.error, outcome.message) == ("ValueError", "no such thing")
    assert {"ValueError", "Exception"} <= set(outcome.bases)
    assert outcome.failed
    assert not outcome.timed_out
    with pytest.raises(ranks.RanksError, match=r"rank 0: .*no such thing"):
        raise ranks.RanksError(ranks.describe(outcome))


def test_a_rank_that_hangs_is_ended_at_the_deadline():
    started = time.monotonic()
    with pytest.raises(ranks.RanksError, match="rank 0: timed out"):
        ranks.run(hang, 1, deadline=1)
    assert time.monotonic() - started < 100
