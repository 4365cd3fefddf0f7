"""Ranks that call different things: told to all of them at once, with both calls."""

from __future__ import annotations

import re

from failures.case import case, require
from failures.work_mismatch import SHORT_S

PLACES = {"one host": [0, 0, 0], "two hosts": [0, 0, 1, 1]}

#: What every rank must read, by kind.
KINDS = {
    "operation": ["barrier #2", "all_reduce #2 float32 [4] SUM"],
    "shape": ["all_reduce #2 float32 [4]", "all_reduce #2 float32 [5]"],
    "shape of a large tensor": ["float32 [262144]", "float32 [262145]"],
    "dtype of the same width": ["#2 float32 [4]", "#2 int32 [4]"],
    "dtype of another width": ["#2 float32 [4]", "#2 float64 [4]"],
    "reduce op": ["#2 float32 [4] SUM", "#2 float32 [4] MAX"],
    "root": ["broadcast #2 float32 [4] root 0", "broadcast #2 float32 [4] root "],
    "order of equal shapes": ["#2 float32 [4] SUM (first)", "#2 float32 [4] SUM (second)"],
    "asynchronous": ["all_reduce #2 float32 [4]", "all_reduce #2 float32 [5]"],
    "gather": ["all_gather #2 float32 [4]", "all_gather #2 float32 [5]"],
    "skipped call": ["all_reduce #2 float32 [5]", "all_reduce #2 float32 [6]"],
}


def everybody_raises(outcomes, parts, kinds=("PeerError",)):
    """Seconds from the last rank's call to each exception."""
    last = max(outcome.value["began"] for outcome in outcomes)
    for outcome in outcomes:
        learned = outcome.value
        assert learned["type"] in kinds, (outcome.rank, learned)
        require(learned["text"], "Hint: ", *parts)
        yield max(0.0, learned["at"] - last)


def deviate(bench, trials: int, function: str, arguments, hosts, parts, kinds=("PeerError",)):
    for _ in range(trials):
        odd_rank = bench.random.randrange(len(hosts))
        run = bench.start(f"work_mismatch.{function}", *arguments, odd_rank, hosts=hosts)
        yield from everybody_raises(bench.finish(run), parts, kinds)


def miss(bench, trials: int, hosts):
    """Beyond the timeout of the operation."""
    for _ in range(trials):
        odd_rank = bench.random.randrange(len(hosts))
        others = [rank for rank in range(len(hosts)) if rank != odd_rank]
        run = bench.start("work_mismatch.miss", "missing call", odd_rank, hosts=hosts)
        run.wait_for("learned", ranks=others)
        run.tell("over")
        for outcome in bench.finish(run):
            learned = outcome.value
            require(learned["text"], "timed out after", "all_reduce #2 float32 [4]", "Hint: ")
            if outcome.rank == odd_rank:
                continue
            require(
                learned["text"],
                f"rank {odd_rank} (pid {run.pids[odd_rank]}",
                "last call: all_reduce #1 float32 [1]",
            )
            yield learned["at"] - learned["began"] - SHORT_S


def call_once_more(bench, trials: int, hosts):
    for _ in range(trials):
        odd_rank = bench.random.randrange(len(hosts))
        run = bench.start("work_mismatch.miss", "extra call", odd_rank, hosts=hosts)
        learned = bench.finish(run)[odd_rank].value
        assert learned["type"] == "PeerError", learned
        require(learned["text"], "has left the group", "all_reduce #2 float32 [4]", "Hint: ")
        # Across hosts the number alone is known.
        assert re.search(r" after (its collective #1|all_reduce #1 )", learned["text"]), learned
        yield learned["at"] - learned["began"]


def cross(bench, trials: int, hosts):
    """Each group lacks ranks that wait in the other one: told at the operation's timeout."""
    for _ in range(trials):
        odd_rank = bench.random.randrange(len(hosts))
        run = bench.start("work_mismatch.cross_groups", odd_rank, hosts=hosts)
        for outcome in bench.finish(run):
            learned = outcome.value
            assert learned["type"] in ("TimeoutError", "PeerError"), learned
            require(learned["text"], "timed out after", "all_reduce #1 float32 [4]", "Hint: ")
            yield learned["at"] - learned["began"] - SHORT_S


def register(name: str, place: str, measure) -> None:
    hosts = PLACES[place]
    case("11", f"{name}, {place}", bound_s=1.0, short=1, full=20, num_hosts=max(hosts) + 1)(
        lambda bench, trials: measure(bench, trials, hosts)
    )


def register_all() -> None:
    for place in PLACES:
        for kind, parts in KINDS.items():
            register(
                f"other {kind}" if "call" not in kind else kind,
                place,
                lambda bench, trials, hosts, kind=kind, parts=parts: deviate(
                    bench, trials, "deviate", [kind], hosts, parts
                ),
            )
        register("missing call", place, miss)
        register("extra call", place, call_once_more)
        register("other group", place, cross)
        register(
            "other world size",
            place,
            lambda bench, trials, hosts: deviate(
                bench, trials, "claim_world_size", [], hosts,
                [f"has world size {len(hosts)}", f"has world size {len(hosts) + 1}"],
            ),
        )  # fmt: skip
        register(
            "other bucket order",
            place,
            lambda bench, trials, hosts: deviate(
                bench, trials, "swap_buckets", [], hosts, ["'a'", "'b'"],
                ("ArgumentError", "PeerError", "StateError"),
            ),
        )  # fmt: skip


register_all()
