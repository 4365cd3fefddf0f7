"""`libddp run --in-place`: workers that survive the failure of another one keep their processes.

torch's agent stops all workers and starts all anew. This one, on torch's public rendezvous, starts
a newcomer in the place of what has ended, asks the others to leave their groups, waits until all
have come (@libddp.elastic.run, libddp::rejoin), meets the other hosts, and tells everybody who it
is in the epoch that begins. So no epoch begins before all ranks of this host are there, and one
that fails meanwhile is just another newcomer. docs/elastic.md, "In place".

    Agent(args, attempts, workers, hosts).run()

Ways out are torch's: it returns when all ranks have ended well, raises ChildFailedError,
SignalException, and what a rendezvous raises. Thread rule: the first thread, for signals.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
import uuid
from string import Template

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    registry,
)

from libddp import _attempts, _hosts, _pidfds, _rendezvous, _worker_ends
from libddp._hosts import say
from libddp._in_place_worker import Program, Worker
from libddp._process_states import is_stopped

#: Where a worker finds its launcher.
SOCKET = "LIBDDP_IN_PLACE"
#: For a survivor to come; a newcomer has so many times that, since it may import much.
REJOIN_SECONDS = 30
_NEWCOMER = 10
#: Between looks at the other hosts, and for them to end after this one.
_HOSTS_SECONDS = 0.25
_OTHERS_SECONDS = 300
#: For those that end by themselves of what another one has met.
_SETTLE_SECONDS = 0.3
_END_SECONDS = 5.0
#: Why an epoch ends that nothing has failed in; also in what the other hosts' ranks hear of it.
_HOSTS = "hosts come, or start again"
_CREDENTIALS = struct.Struct("3i")


def check(args) -> None:
    """
    Raises:
        ArgumentError: --in-place does not go together with another flag.
    """
    problem = (
        "--run-path starts functions, not programs"
        if args.run_path
        else "--virtual-local-rank gives workers other devices than their rank"
        if getattr(args, "virtual_local_rank", False)
        else f"--node_unit={args.node_unit} stops the workers of spare hosts"
        if args.node_unit > 1
        else "--duplicate-stdout-filters and -stderr-filters are torch's agent's"
        if getattr(args, "duplicate_stdout_filters", None)
        or getattr(args, "duplicate_stderr_filters", None)
        else f"--rdzv-backend={args.rdzv_backend} lets hosts meet once"
        if args.rdzv_backend not in (_rendezvous.NAME, _rendezvous.LOCAL_NAME)
        else ""
    )
    if problem:
        from libddp.errors import ArgumentError

        raise ArgumentError(
            f"libddp run: --in-place: {problem}. Hint: leave out one of the two"
            + ("; on several hosts pass --rdzv-backend=c10d." if "rdzv" in problem else ".")
        )
    _pidfds.require("--in-place")


class Agent:
    """The workers of this host, through all epochs."""

    def __init__(
        self,
        args,
        attempts: _attempts.Attempts,
        ends: _worker_ends.Workers,
        hosts: _hosts.Hosts,
    ) -> None:
        args.master_port = args.master_port or 29500  # as torchrun; without a meaning here
        self._config, command, arguments = torchrun.config_from_args(args)
        config = self._config
        self._program = Program(config.role, command, arguments, config.numa_options)
        self._attempts, self._ends, self._hosts = attempts, ends, hosts
        self._limit, self._shutdown_seconds = args.rejoin_timeout, args.shutdown_timeout
        self._workers: dict[int, Worker] = {}
        self._gone: list[Worker] = []
        #: Of the epoch that ends, by local rank.
        self._failures: dict[int, ProcessFailure] = {}
        #: Of the newest meeting, by local rank.
        self._environments: dict[int, dict[str, str]] = {}
        self._folder, self._began = -1, 0.0
        #: Some worker has come, so the program knows how to.
        self._has_lines = False
        self._poll = select.poll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def run(self) -> None:
        """Until all ranks of all hosts have ended, or the run has failed."""
        config = self._config
        self._handler = registry.get_rendezvous_handler(
            RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
        )
        take_signals(config.signals_to_handle)
        self._listen()
        number, is_over = signal.SIGTERM, True
        try:
            self._start_all()
            self._supervise()
        except RendezvousGracefulExitError:
            pass
        except SignalException as end:
            number, is_over = end.sigval, False  # as torch's: the other hosts may go on
            self._hosts.leave()  # before their ranks miss those of this one
            raise
        finally:
            self._stop(number)
            self._listener.close()
            if is_over:
                self._handler.shutdown()

    def _listen(self) -> None:
        name = f"libddp-run-{uuid.uuid4().hex}"
        self._listener.bind("\0" + name)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)
        os.environ[SOCKET] = name

    def _supervise(self) -> None:
        several, next_look = self._config.max_nodes > 1, 0.0
        while True:
            if all(worker.status == 0 for worker in self._workers.values()):
                if not several or self._have_others_ended():
                    return
                self._gather(_HOSTS)
            self._look(_HOSTS_SECONDS if several else None)
            self._let_in()
            came = [worker for worker in self._workers.values() if worker.is_ready]
            if self._failures:
                self._gather("a rank of this host has ended")
            elif came:
                self._gather(came[0].why)
            elif several and time.monotonic() >= next_look:
                next_look = time.monotonic() + _HOSTS_SECONDS
                if self._handler.num_nodes_waiting() > 0:
                    self._gather(_HOSTS)

    def _have_others_ended(self) -> bool:
        """Waits for the workers of other hosts; False if these start again."""
        store = self._info.store
        names = [f"libddp/in_place/ended/{rank}" for rank in range(self._info.world_size)]
        limit = time.monotonic() + _OTHERS_SECONDS
        try:
            store.set(names[self._info.rank], "")
            while not store.check(names) and not self._handler.is_closed():
                if self._handler.num_nodes_waiting() > 0:
                    return False
                if time.monotonic() > limit:
                    say(f"other hosts have not ended within {_OTHERS_SECONDS} s of this one")
                    return True
                time.sleep(_HOSTS_SECONDS)
        except (RuntimeError, RendezvousConnectionError):
            return not self._hosts.are_elsewhere()
        return True

    # What happens to the workers.

    def _look(self, seconds: float | None) -> None:
        """Waits for something to happen, and notes it."""
        by_number = {}
        for worker in self._workers.values():
            if worker.is_alive:
                by_number[worker.pidfd] = worker
            if worker.line is not None:
                by_number[worker.line.fileno()] = worker
        for number in by_number:
            self._poll.register(number, select.POLLIN)
        try:
            found = self._poll.poll(None if seconds is None else max(0.0, seconds) * 1e3)
        finally:
            for number in by_number:
                self._poll.unregister(number)
        for number, _ in found:
            worker = by_number.get(number)
            if worker is None:
                self._accept()
            elif number == worker.pidfd:
                self._note_end(worker)
            elif worker.line is not None:
                worker.read()

    def _accept(self) -> None:
        """Of its own workers only, as the kernel names the process at the other end."""
        try:
            line, _ = self._listener.accept()
        except OSError:
            return  # it is gone again
        told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(told)[0]
        for worker in self._workers.values():
            if worker.pid == pid and worker.is_alive:
                worker.connect(line)
                self._has_lines = True
                return
        line.close()

    def _note_end(self, worker: Worker) -> None:
        worker.wait()
        worker.close()
        self._gone.append(worker)
        if worker.status != 0:
            self._failures[worker.local_rank] = worker.failure()

    def _let_in(self) -> None:
        """Workers that have begun while their epoch runs."""
        for worker in self._workers.values():
            if worker.is_ready and not worker.why:
                worker.go(self._assignment(worker))

    def _settle(self, seconds: float) -> None:
        """Until all have ended or come."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and not all(
            (worker.is_ready and worker.line) or not worker.is_alive
            for worker in self._workers.values()
        ):
            self._look(limit - time.monotonic())

    def _stop(self, number: int = signal.SIGTERM) -> None:
        alive = [worker for worker in self._workers.values() if worker.is_alive]
        for worker in alive:
            worker.signal(signal.Signals(number))
        limit = time.monotonic() + self._shutdown_seconds
        for worker in alive:
            if not worker.wait(max(0.0, limit - time.monotonic())):
                worker.signal(signal.SIGKILL)
                worker.wait()
            worker.close()
            self._gone.append(worker)
        self._end_logs()

    # From one epoch to the next.

    def _gather(self, reason: str) -> None:
        """All workers of this host come, or are replaced; then the next epoch begins."""
        is_free = _HOSTS in reason and not self._failures
        is_excused = not is_free and self._hosts.has_one_left()
        if is_excused:
            is_free, self._failures = True, {}
            say("another host has left the run, which is not counted")
        if not is_free and self._attempts.restarts >= self._attempts.max_restarts:
            self._give_up()
        if not self._has_lines:
            return self._restart_all(is_excused)
        restarts, limit = self._attempts.restarts, time.monotonic() + self._limit
        while not all(worker.is_ready for worker in self._workers.values()):
            for worker in self._workers.values():
                worker.ask_to_leave(reason)
            if not is_free:
                self._end_stopped()
            gone = [worker for worker in self._workers.values() if not worker.is_alive]
            if any(worker.status and not worker.was_in for worker in gone):
                self._settle(_SETTLE_SECONDS)
                self._charge()  # a newcomer has failed, beside the one that it was to replace
            self._start(worker.local_rank for worker in gone)
            self._look(limit - time.monotonic() if time.monotonic() < limit else 1.0)
            self._end_stuck(limit)
        if self._failures and is_excused:
            self._failures = {}
        elif self._failures:
            self._charge()
        elif not is_free and self._attempts.restarts == restarts:
            first = next(worker for worker in self._workers.values() if worker.why)
            self._attempts.came_back(int(self._rank(first)), first.why)
        self._meet()
        self._begin_epoch()

    def _restart_all(self, is_excused: bool) -> None:
        """No worker has ever come: as torch's agent does it."""
        self._settle(_SETTLE_SECONDS)
        self._stop()
        if self._failures and not is_excused:
            self._charge()
        self._failures = {}
        say("no worker has come to @libddp.elastic.run, so all are started again")
        self._start_all()

    def _end_stuck(self, limit: float) -> None:
        now = time.monotonic()
        for worker in self._workers.values():
            times = 1 if worker.was_in else _NEWCOMER
            end = limit if worker.was_in else worker.started + times * self._limit
            if worker.is_ready or not worker.is_alive or now < end:
                continue
            self._kill(
                worker,
                f"has not come to the next epoch within {times * self._limit} s, so it is ended "
                "and replaced. Hint: it is stuck, or its main() has no @libddp.elastic.run; "
                "--rejoin-timeout=SECONDS.",
            )

    def _end_stopped(self) -> None:
        """All others have missed them, and come."""
        missing = [w for w in self._workers.values() if w.is_alive and not w.is_ready]
        if not all(worker.was_in and is_stopped(worker.pid) for worker in missing):
            return
        for worker in missing:
            self._kill(
                worker,
                "is stopped (SIGSTOP or Ctrl-Z), and the others have gone on without it, so it is "
                "ended and replaced",
            )

    def _kill(self, worker: Worker, why: str) -> None:
        say(f"rank {self._rank(worker)} (pid {worker.pid}) {why}")
        worker.signal(signal.SIGKILL)
        self._note_end(worker)

    def _charge(self) -> None:
        """One failure of --max-restarts.

        Raises:
            ChildFailedError: there is none left, or it is the same as the one before.
        """
        if self._attempts.restarts >= self._attempts.max_restarts:
            self._give_up()
        self._tell(self._failures)
        self._attempts.check()
        self._failures = {}
        self._tell({})

    def _give_up(self) -> None:
        """The workers end of what they have met, or are ended; what they leave is the report."""
        for worker in self._workers.values():
            worker.ask_to_leave("the run ends")
        self._settle(_END_SECONDS)  # who was first may need longer to end than who follows
        for worker in self._workers.values():
            worker.hang_up()
        self._settle(_END_SECONDS)
        self._stop()
        ended = self._workers.values()
        self._tell(self._failures or {w.local_rank: w.failure() for w in ended if w.status})
        raise ChildFailedError(self._config.role, self._ends.failed())

    def _meet(self) -> None:
        """With the other hosts; who the workers of this one are among all."""
        charged = self._ends.told
        try:
            self._info = info = self._handler.next_rendezvous()
        except RendezvousClosedError:
            self._ends.told = charged
            raise
        names = [f"libddp/in_place/workers/{rank}" for rank in range(info.world_size)]
        info.store.set(names[info.rank], str(self._config.nproc_per_node))
        sizes = [int(info.store.get(name)) for name in names]
        first = sum(sizes[: info.rank])
        common = {
            "WORLD_SIZE": sum(sizes),
            "LOCAL_WORLD_SIZE": sizes[info.rank],
            "GROUP_RANK": info.rank,
            "GROUP_WORLD_SIZE": info.world_size,
            "ROLE_NAME": self._program.role,
            "ROLE_WORLD_SIZE": sum(sizes),
            "MASTER_ADDR": info.bootstrap_store_info.master_addr,
            "MASTER_PORT": info.bootstrap_store_info.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._ends.number,
            "TORCHELASTIC_MAX_RESTARTS": self._attempts.max_restarts,
            "TORCHELASTIC_RUN_ID": self._config.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": self._handler.use_agent_store,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        for local in range(self._config.nproc_per_node):
            own = {"LOCAL_RANK": local, "RANK": first + local, "ROLE_RANK": first + local}
            environment = {name: str(value) for name, value in (common | own).items()}
            self._environments[local] = environment
        self._began = time.monotonic()

    def _start_all(self) -> None:
        self._meet()
        self._has_lines = False
        self._start(range(self._config.nproc_per_node))

    def _start(self, local_ranks) -> None:
        """A newcomer gets the last epoch's environment, and the next one's when that begins."""
        local_ranks = sorted(local_ranks)
        if not local_ranks:
            return
        number = self._ends.number
        self._folder = max(self._folder + 1, number)
        environments = {local: dict(env) for local, env in self._environments.items()}
        self._ends.number = self._folder  # names the folder of the logs
        logs = self._config.logs_specs.reify(environments)
        self._ends.number = number
        for local in local_ranks:
            environment = environments[local] | {"TORCHELASTIC_RESTART_COUNT": str(number)}
            self._workers[local] = Worker.start(
                local, self._program, environment, logs, self._prefix(environment)
            )
        self._tell({})

    def _begin_epoch(self) -> None:
        """All workers are there: each is told who it is."""
        stayed = sum(worker.was_in for worker in self._workers.values())
        say(
            f"epoch {self._ends.number}: {self._environments[0]['WORLD_SIZE']} ranks; of this "
            f"host's {len(self._workers)} {stayed} stay in place, "
            f"{len(self._workers) - stayed} are new"
        )
        newest = max(self._workers.values(), key=lambda worker: worker.started)
        for worker in self._workers.values():
            worker.move_logs(os.path.dirname(os.path.dirname(newest.error_file)))
            worker.go(self._assignment(worker))
        self._tell({})
        self._end_logs()

    def _end_logs(self) -> None:
        """Of workers that have ended; what shows them looks ten times a second, and then ends."""
        while self._gone:
            self._gone.pop().end_logs()

    def _assignment(self, worker: Worker) -> dict:
        last = self._attempts.last_failure
        return {
            "epoch": self._ends.number,
            "restarts": self._attempts.restarts,
            "failure": "" if last is None else f"rank {last.rank}: {last.text}",
            "environment": self._environments[worker.local_rank]
            | {"TORCHELASTIC_ERROR_FILE": worker.error_file},
        }

    def _tell(self, failures: dict[int, ProcessFailure]) -> None:
        """The report and the status line know the workers, and what has failed."""
        files = {local: worker.error_file for local, worker in self._workers.items()}
        self._ends.go_on(
            files | {local: failure.error_file for local, failure in failures.items()},
            {local: int(env["RANK"]) for local, env in self._environments.items()},
            self._began,
        )
        self._ends.tell({local: w.pid for local, w in self._workers.items()}, failures)

    def _rank(self, worker: Worker) -> str:
        return self._environments[worker.local_rank]["RANK"]

    def _prefix(self, environment: dict[str, str]) -> str:
        """Of a line of its logs, where they are shown (--tee)."""
        role, local, rank = (environment[name] for name in ("ROLE_NAME", "LOCAL_RANK", "RANK"))
        template = self._config.log_line_prefix_template
        if not template:
            return f"[{role}{local}]:"
        return Template(template).safe_substitute(
            role_name=role, local_rank=local, rank=rank, hostname=socket.gethostname()
        )


def take_signals(names: str) -> None:
    """As torch's launcher: one of them ends the run as an exception of the first thread."""

    def end(number: int, _frame) -> None:
        raise SignalException(f"Process {os.getpid()} got signal: {number}", signal.Signals(number))

    for name in names.split(","):
        signal.signal(getattr(signal, name.strip()), end)
