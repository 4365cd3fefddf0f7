"""The plan of a small model beside what two ranks of it take."""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import memory

#: Small: what is the same at every size (pages of pools, of the allocator) weighs more than in
#: tests/bench/memory.py, where a larger model is within 10 %.
OPTIONS = Namespace(
    layers=6,
    width=384,
    heads=4,
    batch=8,
    length=64,
    vocabulary=128,
    checkpointing=False,
    default_malloc=False,
)


def test_what_is_planned_is_what_is_measured():
    line = memory.line_of(
        "libddp FULL_SHARD", "libddp", OPTIONS, lambda name: memory.plans(OPTIONS, name)
    )
    assert 0.75 < line["state_ratio"] < 1.25, line
    assert 0.75 < line["peak_ratio"] < 1.25, line
    # Parameters exist once on the host.
    assert 0.8 < line["wrapped_x"] < 1.4, line
