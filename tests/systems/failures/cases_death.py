"""Ranks that die: killed at random points, by other signals, together with the store."""

from __future__ import annotations

import signal
import time

from failures.case import case, require


def survivors_of(bench, run, victim: int, fault: float, parts=()):
    """Seconds from the fault to each survivor's exception; their texts must name the victim."""
    for outcome in bench.finish(run, lost=[victim]):
        learned = outcome.value
        assert learned["type"] in ("PeerError", "NetworkError"), learned
        require(learned["text"], f"rank {victim} (pid {run.pids[victim]} on ", "Hint: ", *parts)
        assert "DistBackendError" in learned["bases"], learned["bases"]
        yield max(0.0, learned["at"] - fault)


def kill_at_random(bench, trials: int, hosts: list[int], number: int, parts=()):
    for _ in range(trials):
        run = bench.start("loop", hosts=hosts)
        run.wait_for("ready")
        time.sleep(bench.random.uniform(0, 0.05))
        victim = bench.random.randrange(len(hosts))
        fault = run.signal(victim, number)
        yield from survivors_of(bench, run, victim, fault, parts)


@case("1", "kill -9 of 1 of 4, one host", bound_s=0.2, short=5, full=100)
def kill_on_one_host(bench, trials):
    yield from kill_at_random(bench, trials, [0] * 4, signal.SIGKILL, ["died", "its last call"])


@case("1", "kill -9 of 1 of 4, two hosts", bound_s=1.0, short=4, full=100, num_hosts=2)
def kill_on_two_hosts(bench, trials):
    yield from kill_at_random(bench, trials, [0, 0, 1, 1], signal.SIGKILL, ["its last call"])


@case("1", "SIGTERM ends 1 of 4, one host", bound_s=0.2, short=2, full=20)
def terminate_on_one_host(bench, trials):
    yield from kill_at_random(bench, trials, [0] * 4, signal.SIGTERM, ["died"])


@case("1", "SIGSEGV ends 1 of 4, one host", bound_s=0.2, short=1, full=20)
def crash_on_one_host(bench, trials):
    yield from kill_at_random(bench, trials, [0] * 4, signal.SIGSEGV, ["died"])


def leave_early(bench, trials: int, how: str, parts):
    for _ in range(trials):
        victim = bench.random.randrange(3)
        run = bench.start("work.loop_and_leave", victim, how, hosts=[0] * 3)
        outcomes = bench.finish(run, lost=[victim])
        fault = float((run.folder / "left").read_text())
        for outcome in outcomes:
            assert outcome.value["type"] == "PeerError", outcome.value
            named = f"rank {victim} (pid {run.pids[victim]}"
            require(outcome.value["text"], named, "Hint: ", *parts)
            yield outcome.value["at"] - fault


@case("1", "os._exit of a rank in the midst", bound_s=0.2, short=2, full=50)
def exit_at_once(bench, trials):
    yield from leave_early(bench, trials, "_exit", ["died"])


@case("1", "sys.exit of a rank in the midst", bound_s=0.5, short=2, full=50)
def exit_in_order(bench, trials):
    yield from leave_early(bench, trials, "exit", ["left the group"])


@case("1", "kill -9 of 1 of 4 while groups work in threads", bound_s=0.2, short=2, full=50)
def kill_among_threads(bench, trials):
    """Yields the last of each survivor's groups."""
    for _ in range(trials):
        run = bench.start("work_soak.work_in_threads", hosts=[0] * 4)
        run.wait_for("ready")
        time.sleep(bench.random.uniform(0, 0.2))
        victim = bench.random.randrange(4)
        fault = run.signal(victim, signal.SIGKILL)
        for outcome in bench.finish(run, lost=[victim]):
            for learned in outcome.value:
                assert learned["type"] == "PeerError", learned
                require(learned["text"], "(pid ", "Hint: ")
                yield learned["at"] - fault
