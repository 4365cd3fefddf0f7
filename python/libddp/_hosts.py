"""Which hosts take part in a start of the workers, and whether they are fit for it.

After the launchers have met:
- --node_unit=N: a multiple of N hosts runs; the others wait as spares until a host comes or goes.
- A host whose launcher a signal ends says so before its workers end: those who stay do not count
  that as a failure.
- --network-check: before the first start each host multiplies matrices, all reduce together and
  talk in pairs (_network_check.py); hosts slower than half the median are named, and with
  --exclude-straggler they leave.

    hosts = Hosts(unit=2, check=True, exclude=False)
    info = hosts.meet(handler, handler.next_rendezvous)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
)

from libddp import _network_check
from libddp._torch_patches import rendezvous_exit

#: So many times the median, or the median so many times a host's figure, is slow.
SLOW = 2.0
CHECK_SECONDS = 120
_POLL_SECONDS = 0.5
#: For the others to be told that this host leaves.
LEAVE_SECONDS = 2.0


class StragglerError(RendezvousClosedError):
    """This host leaves the run: it is slow, and --exclude-straggler was given."""


class SpareEnded(RendezvousClosedError):
    """The run has ended, and this host was not needed."""


@dataclass
class Hosts:
    """What the flags of this launcher ask of a meeting."""

    unit: int = 1
    check: bool = False
    exclude: bool = False
    #: Of hosts that have met and are not needed.
    num_spares: int = 0
    _handler: object = None
    _leaving: threading.Thread | None = None
    _is_excused: bool = False

    def leave(self) -> None:
        """A signal ends this launcher: the others know it, and start without it at once.

        Called before its workers are stopped, whom the others' ranks then miss; and again as the
        launcher ends. A store that does not answer holds nothing up for long.
        """
        if self._handler is None:
            return
        if self._leaving is None:
            self._leaving = threading.Thread(target=_leave, args=(self._handler,), daemon=True)
            self._leaving.start()
        self._leaving.join(LEAVE_SECONDS)

    def linger(self) -> None:
        """As the launcher ends that a signal has ended: if it has the store, the others first go to
        another one.
        """
        standby = getattr(self._handler, "standby", None)
        if standby is not None:
            standby.linger()

    def are_elsewhere(self) -> bool:
        """The store does not answer: whether the launchers are to meet at another one."""
        standby = getattr(self._handler, "standby", None)
        try:
            return standby is not None and standby.is_lost(RendezvousConnectionError())
        except RendezvousClosedError:
            return False

    def has_one_left(self) -> bool:
        """Whether one that takes part in this start of the workers has left in order."""
        departures = getattr(self._handler, "departures", None)
        return departures is not None and departures.has_any()

    def excuse(self) -> bool:
        """The workers of this host have failed: whether that is because another host has left.

        torch's agent then starts all anew as for a host that comes, which it does not count.
        """
        if not self._is_excused and self.has_one_left():
            self._is_excused = True
            say(
                "another host has left the run: the workers are started again, which is not counted"
            )
        return self._is_excused

    def meet(self, handler, next_rendezvous) -> RendezvousInfo:
        """What torch's agent gets instead of the handler's answer.

        Raises:
            StragglerError, SpareEnded: this host has nothing to do any more.
        """
        self._handler, self._is_excused = handler, False
        info = next_rendezvous()
        if self.check:
            self.check = False
            if self._find_slow(handler, info) and self.exclude:
                info = next_rendezvous()  # without those that left
        while self.unit > 1 and not self._is_needed(info):
            self._wait_as_spare(handler, info)
            info = next_rendezvous()
        self._wake_for_hosts(handler)
        if self.unit > 1:
            needed = info.world_size - self.num_spares
            info = RendezvousInfo(info.store, info.rank, needed, info.bootstrap_store_info)
        return info

    def _is_needed(self, info) -> bool:
        self.num_spares = info.world_size % self.unit
        return info.rank < info.world_size - self.num_spares

    def _wait_as_spare(self, handler, info) -> None:
        say(
            f"this host is a spare: {info.world_size} hosts are there, and --node_unit={self.unit} "
            f"lets {info.world_size - self.num_spares} run"
        )
        try:
            while not self._num_waiting(handler):
                if handler.is_closed():
                    raise SpareEnded
                time.sleep(_POLL_SECONDS)
        except RendezvousConnectionError:  # the launcher that had the store has ended
            raise SpareEnded from None

    def _num_waiting(self, handler) -> int:
        """Where the store is lost all meet again; those of a run that has ended do not."""
        try:
            return type(handler).num_nodes_waiting(handler)
        except RendezvousConnectionError as error:
            standby = getattr(handler, "standby", None)
            if standby is None:
                raise
            try:
                if standby.is_lost(error):
                    return self.unit
            except RendezvousClosedError:
                return 0
            raise

    def _wake_for_hosts(self, handler) -> None:
        """torch's agent starts all workers anew for every host that waits."""

        def num_nodes_waiting() -> int:
            if self._is_excused:
                return 1
            waiting = self._num_waiting(handler)
            return waiting if self.unit == 1 or waiting + self.num_spares >= self.unit else 0

        handler.num_nodes_waiting = num_nodes_waiting

    def _find_slow(self, handler, info) -> bool:
        """Whether some host is slow; all hosts find the same."""
        everyone = _exchange(info, _measure(handler, info))
        slow = judge(everyone)
        if info.rank == 0:
            say(summary(everyone))
        for rank, told in slow.items():
            if rank == info.rank:
                say(f"this host ({everyone[rank]['host']}) is slow: {told}")
            elif info.rank == 0:
                say(f"host {rank} ({everyone[rank]['host']}) is slow: {told}")
        if self.exclude and info.rank in slow:
            handler.shutdown = lambda: True  # which would end the run of the others
            raise StragglerError
        return bool(slow)


def _leave(handler) -> None:
    departures = getattr(handler, "departures", None)
    try:
        if departures is not None:
            departures.tell()
    except RendezvousConnectionError:
        return  # nobody can be told
    rendezvous_exit.leave(handler)


def judge(everyone: list[dict]) -> dict[int, str]:
    """Slow hosts, each with its figure against the median."""
    slow = {}
    times = [facts["matmul_s"] for facts in everyone]
    usual = statistics.median_low(times)
    speeds = [max(facts["links_mb_s"].values(), default=0.0) for facts in everyone]
    usual_speed = statistics.median_high(speeds)
    for rank, (seconds, speed) in enumerate(zip(times, speeds, strict=True)):
        told = []
        if seconds > SLOW * usual:
            told.append(f"matmul {seconds * 1e3:.1f} ms, median {usual * 1e3:.1f} ms")
        if speed * SLOW < usual_speed:
            told.append(f"network {speed:.0f} MB/s at best, median {usual_speed:.0f} MB/s")
        if told:
            slow[rank] = "; ".join(told)
    return slow


def summary(everyone: list[dict]) -> str:
    """One line for the launcher of host 0."""
    times = [facts["matmul_s"] * 1e3 for facts in everyone]
    text = f"network check of {len(everyone)} hosts: matmul {min(times):.1f} to {max(times):.1f} ms"
    if len(everyone) == 1:
        return text
    speeds = [max(facts["links_mb_s"].values()) for facts in everyone]
    reduced = max(facts["all_reduce_s"] for facts in everyone)
    megabytes = _network_check.REDUCED_NUMEL * 4 / 1e6
    text += f", all-reduce of {megabytes:.0f} MB {reduced * 1e3:.1f} ms"
    return f"{text}, each host's best link {min(speeds):.0f} to {max(speeds):.0f} MB/s"


def _measure(handler, info) -> dict:
    """Runs this host's part; a process of its own, since the launcher must not touch a device."""
    store = info.bootstrap_store_info
    environment = os.environ | {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": str(store.master_addr),
        "MASTER_PORT": str(store.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": str(handler.use_agent_store),
        "TORCHELASTIC_RESTART_COUNT": "check",
        "TORCHELASTIC_RUN_ID": handler.get_run_id(),
    }
    done = subprocess.run(
        [sys.executable, "-m", _network_check.__name__],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=CHECK_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        from libddp.errors import NetworkError

        raise NetworkError(
            f"libddp run: --network-check of host {info.rank} ended with {done.returncode}; what it"
            " said is above. Hint: leave out --network-check if this is known."
        )
    return json.loads(done.stdout.splitlines()[-1]) | {"host": os.uname().nodename}


def _exchange(info, facts: dict) -> list[dict]:
    """Every host's facts, by rank; the launchers' store waits for the last one."""
    keys = [f"libddp/network_check/{rank}" for rank in range(info.world_size)]
    info.store.set(keys[info.rank], json.dumps(facts))
    return [json.loads(info.store.get(key)) for key in keys]


def say(text: str) -> None:
    print(f"libddp run: {text}", file=sys.stderr, flush=True)
