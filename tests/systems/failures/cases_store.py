"""The store, the rank that hosts it, and what ranks read from their environment."""

from __future__ import annotations

import signal
import socket
import time

from failures.case import case, require


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(bench, hosts, **changes):
    port = free_port()

    def of(rank: int) -> dict:
        values = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": bench.fleet.addresses[0],
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        return values | changes

    return of


@case("store", "host of the store killed, ranks go on: longest step", bound_s=1.0, short=2, full=20)
def store_dies(bench, trials):
    """The store belongs to a process that is no rank, as torchrun's agent. Yields steps."""
    for _ in range(trials):
        agent = bench.start("work_store.host_store", hosts=[0])
        agent.wait_for("open")
        port = int((agent.folder / "port").read_text())
        run = bench.start("work_store.work_without_store", port, hosts=[0] * 3)
        run.wait_for("ready")
        agent.signal(0, signal.SIGKILL)
        agent.finish()
        time.sleep(0.5)
        run.tell("stop")
        for outcome in bench.finish(run):
            learned = outcome.value["new_group"]
            # torch's own bookkeeping or our bootstrap, whichever asks the store first.
            assert "DistError" in learned["bases"], learned
            assert learned["at"] - learned["began"] < 30, learned
            yield outcome.value["longest_s"]


@case("master", "rank 0, which hosts the store, killed", bound_s=0.2, short=3, full=50)
def master_dies(bench, trials):
    for _ in range(trials):
        hosts = [0] * 3
        run = bench.start(
            "work_store.use_environment", hosts=hosts, env=environment_of(bench, hosts)
        )
        run.wait_for("ready")
        time.sleep(bench.random.uniform(0, 0.05))
        fault = run.signal(0, signal.SIGKILL)
        for outcome in bench.finish(run, lost=[0]):
            assert outcome.value["type"] == "PeerError", outcome.value
            require(outcome.value["text"], f"rank 0 (pid {run.pids[0]} on ", "died")
            yield outcome.value["at"] - fault


@case("master", "rank 0, which hosts the store, killed while ranks join", bound_s=1.0, short=2,
      full=20)  # fmt: skip
def master_dies_early(bench, trials):
    for _ in range(trials):
        hosts = [0] * 3
        environment = environment_of(bench, hosts, WORLD_SIZE="4")  # the fourth never comes
        run = bench.start("work_store.join_by_environment", hosts=hosts, env=environment)
        run.wait_for("ready")
        time.sleep(0.5)
        fault = run.signal(0, signal.SIGKILL)
        for outcome in bench.finish(run, lost=[0]):
            learned = outcome.value
            assert learned["type"] in ("StoreError", "PeerError", "NetworkError"), learned
            require(learned["text"], "Hint: ")
            yield learned["at"] - fault


@case("1", "kill -9 of a rank while the others join", bound_s=1.0, short=2, full=50)
def rank_dies_early(bench, trials):
    for _ in range(trials):
        run = bench.start("work_store.die_while_joining", hosts=[0] * 3)
        run.wait_for("ready")
        time.sleep(0.1 + bench.random.uniform(0, 0.1))
        fault = run.signal(2, signal.SIGKILL)
        run.tell("killed")
        for outcome in bench.finish(run, lost=[2]):
            learned = outcome.value
            assert learned["type"] == "PeerError", learned
            require(learned["text"], f"rank 2 (pid {run.pids[2]})", "Hint: ")
            yield learned["at"] - fault


BAD = {
    "RANK": ("abc", "-1", "7"),
    "WORLD_SIZE": ("0", "two", "-3", "99999999999"),
    "MASTER_PORT": ("99999", "0x1F", "-1", ""),
    "MASTER_ADDR": ("tcp://10.0.0.1", ""),
}


@case("environment", "values that make no sense", bound_s=1.0, short=1, full=5)
def bad_environment(bench, trials):
    for _ in range(trials):
        for name, values in BAD.items():
            for value in values:
                environment = environment_of(bench, [0, 0])(1) | {name: value}
                run = bench.start(
                    "work_store.join_by_environment", hosts=[0], env=lambda _, e=environment: e
                )
                yield told(bench, run, name, value)


def told(bench, run, *parts) -> float:
    learned = bench.finish(run)[0].value
    assert learned["type"] in ("ArgumentError", "NetworkError"), learned
    require(learned["text"], "Hint: ", *parts)
    return learned["at"] - learned["began"]


@case("environment", "variables that are missing", bound_s=1.0, short=1, full=5)
def missing_environment(bench, trials):
    for _ in range(trials):
        for name in BAD:
            run = bench.start(
                "work_store.join_without", name, hosts=[0], env=environment_of(bench, [0, 0])
            )
            yield told(bench, run, name, "is not set")
