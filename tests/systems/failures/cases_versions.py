"""Ranks that run other versions of the library: refused while they join, with both versions."""

from __future__ import annotations

import re

import libddp
from failures.case import case
from failures.cases_mismatch import everybody_raises

OWN = f"libddp {libddp.__version__},"
# As long as the own one: the entries of the store count their bytes.
OTHER = re.sub(r"\d", "9", OWN)


def join(bench, trials: int, old: str, new: str, parts, kinds):
    for _ in range(trials):
        odd_rank = bench.random.randrange(3)
        run = bench.start("work_versions.join_as_another", odd_rank, old, new, hosts=[0] * 3)
        yield from everybody_raises(bench.finish(run), parts, kinds)


@case("version", "another version of the library", bound_s=1.0, short=1, full=10)
def other_version(bench, trials):
    parts = [OWN, OTHER, "rank ", "(pid ", "same libddp version"]
    yield from join(bench, trials, OWN, OTHER, parts, ("PeerError",))


@case("version", "another form of the descriptions in the store", bound_s=1.0, short=1, full=10)
def other_cards(bench, trials):
    parts = ["same libddp version"]
    yield from join(
        bench, trials, "libddp-peer-", "libddp-peer-99", parts, ("StoreError", "PeerError")
    )
