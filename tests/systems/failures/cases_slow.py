"""A rank that is only slow: named within 50 steps, and its part of the others' time is right."""

from __future__ import annotations

from failures.case import case

#: Of SlowRankWatch: the first step only starts its clock.
WINDOW = 25
NUM_STEPS = 1 + 2 * WINDOW
SLEEP_S = 0.05
MOST_STEPS = 50
MOST_DIFFERENCE = 0.05


def waited_for(slow: int, rank: int, outcomes: list[dict], has_buffer: bool) -> tuple[float, float]:
    """The part of the last window's time that `rank` waited for `slow`, from the ranks' clocks.

    Where the ranks wait for each other, each wait is for whoever comes last. The first number is
    from when all others have come, since before that `rank` may wait for another one, until `slow`
    has come; the second from when `rank` has come until it goes on. On a busy machine they differ.
    """
    points = [("came", "began")] if has_buffer else []
    come, gone = 0.0, 0.0
    for step in range(NUM_STEPS - WINDOW, NUM_STEPS):
        for arrival, departure in [*points, ("ready", "left")]:
            arrivals = [outcome[arrival][step] for outcome in outcomes]
            if arrivals[slow] == max(arrivals):
                come += arrivals[slow] - sorted(arrivals)[-2]
                gone += outcomes[rank][departure][step] - arrivals[rank]
    left = outcomes[rank]["left"]
    wall = left[-1] - left[-1 - WINDOW]
    return come / wall, gone / wall


def queued_part(outcomes: list[dict]) -> float:
    """The part of the last window's time in which threads of the ranks had no core.

    On a busy machine: while a rank's thread cannot run it posts nothing, and others wait for it.
    """
    num = 1 + WINDOW
    queued = sum(outcome["queued"][-1] - outcome["queued"][-num] for outcome in outcomes)
    return queued / min(outcome["left"][-1] - outcome["left"][-num] for outcome in outcomes)


def become_slow(bench, trials: int, hosts: list[int], has_buffer: bool = False):
    """Yields the time from the first slow step to the one after which the log names the rank."""
    for _ in range(trials):
        slow = bench.random.randrange(len(hosts))
        begin = bench.random.randrange(1, WINDOW)
        run = bench.start(
            "work_slow.train", slow, begin, has_buffer, NUM_STEPS, SLEEP_S, hosts=hosts
        )
        outcomes = [outcome.value for outcome in bench.finish(run, deadline_s=90)]
        speaker = outcomes[1 if slow == 0 else 0]
        named_in = speaker["named_in"]
        assert named_in is not None, f"nobody names rank {slow}"
        assert named_in - begin <= MOST_STEPS, (slow, begin, named_in)
        yield speaker["left"][named_in] - outcomes[slow]["came"][begin] + SLEEP_S
        for rank, outcome in enumerate(outcomes):
            if rank == slow:
                continue
            least, most = waited_for(slow, rank, outcomes, has_buffer)
            share = outcome["shares"][slow]
            # What others cost takes from the share, and never adds to it.
            least_share = least - MOST_DIFFERENCE - queued_part(outcomes)
            assert least_share <= share <= most + MOST_DIFFERENCE, (
                f"rank {rank} of {hosts} for rank {slow}: {least} to {most}, and not {share} "
                f"(nor {least_share}, for want of cores)"
            )
            assert least > 0.2


#: 50 steps of 50 ms.
BOUND_S = 4.0


@case("8", "50 ms slower in each step, 1 of 2", bound_s=BOUND_S, short=1, full=20)
def one_of_two(bench, trials):
    yield from become_slow(bench, trials, [0, 0])


@case("8", "50 ms slower, 1 of 4, with a buffer", bound_s=BOUND_S, short=1, full=20)
def one_of_four(bench, trials):
    yield from become_slow(bench, trials, [0] * 4, has_buffer=True)


@case("8", "50 ms slower, two hosts of 1", bound_s=BOUND_S, short=1, full=20, num_hosts=2)
def hosts_of_one(bench, trials):
    yield from become_slow(bench, trials, [0, 1])


@case("8", "50 ms slower, two hosts of 2", bound_s=BOUND_S, short=1, full=20, num_hosts=2)
def hosts_of_two(bench, trials):
    yield from become_slow(bench, trials, [0, 0, 1, 1])


@case("8", "50 ms slower, hosts of 1 and 2", bound_s=BOUND_S, short=1, full=20, num_hosts=2)
def uneven_hosts(bench, trials):
    yield from become_slow(bench, trials, [0, 1, 1])
