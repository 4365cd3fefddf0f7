"""A gradient that is no number, with LIBDDP_NAN_CHECK=raise: all ranks learn in the same step."""

from __future__ import annotations

from failures.case import case, require


def spoil(bench, trials: int, hosts: list[int]):
    for _ in range(trials):
        victim = bench.random.randrange(len(hosts))
        layer = bench.random.randrange(4)
        step = bench.random.randrange(1, 6)
        run = bench.start(
            "work_numbers.train_until_nan",
            victim,
            layer,
            step,
            hosts=hosts,
            env=lambda _rank: {"LIBDDP_NAN_CHECK": "raise"},
        )
        outcomes = bench.finish(run)
        fault = float((run.folder / "spoiled").read_text())
        for outcome in outcomes:
            learned = outcome.value
            assert learned["type"] == ("StateError" if outcome.rank == victim else "PeerError"), (
                learned
            )
            assert learned["step"] == step, learned
            require(
                learned["text"],
                f"the gradient of parameter '{layer}.weight' (bucket ",
                f" on rank {victim} is NaN or infinite",
                "Hint: ",
            )
            yield learned["at"] - fault


@case("12", "NaN in a gradient of 1 of 4", bound_s=0.5, short=3, full=50)
def one_host(bench, trials):
    yield from spoil(bench, trials, [0] * 4)


@case("12", "NaN in a gradient, two hosts of 2", bound_s=1.0, short=1, full=50, num_hosts=2)
def two_hosts(bench, trials):
    yield from spoil(bench, trials, [0, 0, 1, 1])
