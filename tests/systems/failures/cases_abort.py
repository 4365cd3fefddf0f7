"""A rank that gives up: abort, an exception of user code, Ctrl-C."""

from __future__ import annotations

import signal
import time

from failures.case import case, require


def abort_at_random(bench, trials: int, *, quick_exit: bool):
    """(time of the abort, outcomes) of each trial."""
    for _ in range(trials):
        victim = bench.random.randrange(4)
        delay_s = bench.random.uniform(0, 0.05)
        run = bench.start(
            "work_aborts.loop_and_abort", victim, delay_s, hosts=[0] * 4, quick_exit=quick_exit
        )
        outcomes = bench.finish(run)
        aborted = outcomes[victim].value
        assert aborted["type"] == "StateError", aborted
        for outcome in outcomes:
            require(outcome.value["text"], "loss is NaN")
            if outcome.rank != victim:
                assert outcome.value["type"] == "PeerError", outcome.value
                require(outcome.value["text"], f"rank {victim} (pid {run.pids[victim]}")
        yield aborted["aborted_at"], outcomes


@case("5", "abort at a random point: everybody raises", bound_s=0.5, short=10, full=1000)
def abort_raises(bench, trials):
    for fault, outcomes in abort_at_random(bench, trials, quick_exit=True):
        yield from (outcome.value["at"] - fault for outcome in outcomes)


@case("5", "abort: exit handlers have run", bound_s=2.0, short=1, full=100)
def abort_ends(bench, trials):
    """From the exception to the end of the last exit handler; what follows is the interpreter's."""
    for _, outcomes in abort_at_random(bench, trials, quick_exit=False):
        yield from (outcome.left_at - outcome.value["at"] for outcome in outcomes)


@case("6", "uncaught exception in a forward", bound_s=0.5, short=3, full=50)
def uncaught_exception(bench, trials):
    for _ in range(trials):
        victim = bench.random.randrange(3)
        run = bench.start("work_aborts.train_and_raise", victim, hosts=[0] * 3)
        outcomes = bench.finish(run, lost=[victim])
        fault = float((run.folder / "raised").read_text())
        for outcome in outcomes:
            require(
                outcome.value["text"],
                f"rank {victim} (pid {run.pids[victim]}",
                "LookupError: no such token",
            )
            yield outcome.value["at"] - fault


def interrupt(bench, trials: int, form: str):
    for _ in range(trials):
        run = bench.start("work_aborts.wait_for_interrupt", form, hosts=[0, 0])
        run.wait_for("ready")
        time.sleep(0.05 + bench.random.uniform(0, 0.2))
        fault = run.signal(0, signal.SIGINT)
        run.wait_for("interrupted", ranks=[0])
        run.tell("go on")
        interrupted, other = bench.finish(run)
        assert interrupted.value["type"] == "KeyboardInterrupt", interrupted.value
        # What rank 0 had brought before may be enough for one call, but not for another. An
        # asynchronous call goes on: only the wait for it was interrupted.
        assert other.value["type"] in (None, "PeerError"), other.value
        assert other.value["again"] == (None if form == "async" else "PeerError"), other.value
        yield interrupted.value["at"] - fault


FORMS = ("all_reduce", "async", "large", "recv", "barrier", "backward")


def register_interrupts() -> None:
    for form in FORMS:

        def measure(bench, trials, form=form):
            yield from interrupt(bench, trials, form)

        case("7", f"Ctrl-C in a blocked {form}", bound_s=0.2, short=2, full=50)(measure)


register_interrupts()


@case("7", "Ctrl-C of all 4 at once", bound_s=0.5, short=2, full=50)
def interrupt_all(bench, trials):
    """As in a terminal: each rank has its own interrupt, or hears of another one's before."""
    for _ in range(trials):
        run = bench.start("work_aborts.loop_until_anything", hosts=[0] * 4)
        run.wait_for("ready")
        time.sleep(bench.random.uniform(0, 0.05))
        fault, *_ = [run.signal(rank, signal.SIGINT) for rank in range(4)]
        for outcome in bench.finish(run):
            yield outcome.ended_at - fault


@case("7", "Ctrl-C while joining", bound_s=0.2, short=2, full=50)
def interrupt_meeting(bench, trials):
    for _ in range(trials):
        run = bench.start("work_aborts.join_alone", hosts=[0, 0])
        run.wait_for("ready")
        time.sleep(0.3 + bench.random.uniform(0, 0.2))
        fault = run.signal(0, signal.SIGINT)
        run.wait_for("interrupted", ranks=[0])
        run.tell("go on")
        interrupted, other = bench.finish(run)
        assert interrupted.value["type"] == "KeyboardInterrupt", interrupted.value
        # Who comes later is told, and does not wait.
        assert other.value["type"] == "PeerError", other.value
        require(other.value["text"], f"rank 0 (pid {run.pids[0]})", "KeyboardInterrupt")
        assert other.value["at"] - other.value["began"] < 5
        yield interrupted.value["at"] - fault


@case("10", "collective in a forked child", bound_s=0.1, short=2, full=50)
def forked_child(bench, trials):
    for _ in range(trials):
        run = bench.start("work_aborts.fork_and_call", hosts=[0, 0])
        for outcome in bench.finish(run):
            for name, learned in outcome.value.items():
                assert learned["type"] == "StateError", (name, learned)
                require(learned["text"], "forked", "Hint: ")
                yield learned["at"] - learned["began"]
