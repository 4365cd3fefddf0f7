"""Ranks that are stopped, slow, or stay away after an error that they caught."""

from __future__ import annotations

import signal
import time

from failures.case import case, require


def freeze(bench, trials: int, hosts: list[int], function: str, parts=()):
    for _ in range(trials):
        run = bench.start(function, hosts=hosts)
        run.wait_for("ready")
        time.sleep(bench.random.uniform(0, 0.5))
        victim = bench.random.randrange(len(hosts))
        fault = run.signal(victim, signal.SIGSTOP)
        for rank in range(len(hosts)):
            if rank != victim:
                run.end_of(rank, 30)
        # What was stopped learns the same when it wakes up.
        run.signal(victim, signal.SIGCONT)
        for outcome in bench.finish(run):
            learned = outcome.value
            assert "DistBackendError" in learned["bases"], learned
            if outcome.rank != victim:
                named = f"rank {victim} (pid {run.pids[victim]} on "
                require(learned["text"], named, "no sign of life", "Hint: ", *parts)
                yield learned["at"] - fault


@case("2", "SIGSTOP of 1 of 4 while working, one host", bound_s=5.5, short=1, full=10)
def freeze_on_one_host(bench, trials):
    yield from freeze(bench, trials, [0] * 4, "work.loop", ["it is stopped (SIGSTOP or Ctrl-Z)"])


@case("2", "SIGSTOP of 1 of 4 while nothing is called, one host", bound_s=5.5, short=0, full=10)
def freeze_while_idle(bench, trials):
    yield from freeze(bench, trials, [0] * 4, "work.idle", ["it is stopped (SIGSTOP or Ctrl-Z)"])


@case("2", "SIGSTOP of 1 of 4 while working, two hosts", bound_s=5.5, short=0, full=10, num_hosts=2)
def freeze_on_two_hosts(bench, trials):
    yield from freeze(bench, trials, [0, 0, 1, 1], "work.loop")


@case("2", "stopped for 2 s and back is no failure: longest step", bound_s=4.0, short=1, full=10)
def freeze_for_a_while(bench, trials):
    for _ in range(trials):
        run = bench.start("work_until_told", hosts=[0] * 3)
        run.wait_for("ready")
        run.signal(1, signal.SIGSTOP)
        time.sleep(2)
        run.signal(1, signal.SIGCONT)
        time.sleep(0.2)
        run.tell("stop")
        yield max(outcome.value["longest_s"] for outcome in bench.finish(run))


@case("6", "exception in a forward, caught by its rank", bound_s=0.5, short=3, full=50)
def caught_exception(bench, trials):
    yield from catch_exception(bench, trials, "forward")


@case("6", "exception in a backward, caught by its rank", bound_s=0.5, short=3, full=50)
def caught_in_backward(bench, trials):
    yield from catch_exception(bench, trials, "backward")


def catch_exception(bench, trials: int, fails_in: str):
    for _ in range(trials):
        victim = bench.random.randrange(3)
        run = bench.start("work_aborts.train_and_catch", victim, fails_in, hosts=[0] * 3)
        others = [rank for rank in range(3) if rank != victim]
        run.wait_for("learned", ranks=others)
        run.tell("over")
        fault = float((run.folder / "raised").read_text())
        for outcome in bench.finish(run):
            if outcome.rank == victim:
                continue
            require(
                outcome.value["text"],
                f"rank {victim} (pid {run.pids[victim]}",
                f"in {fails_in}: LookupError: no such token (work_aborts.py:",
                "Hint: ",
            )
            yield outcome.value["at"] - fault
