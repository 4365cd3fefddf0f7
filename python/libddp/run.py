"""`libddp run`, `libddp-run`, `python -m libddp.run`: torchrun's flags and environment.

    libddp run --nproc-per-node=2 train.py --its=arguments

A thin layer over torch.distributed.run; docs/launcher.md says what it adds. Here:
- --drop-in: the workers run on libddp although their script names only torch (docs/drop_in.md).
- One node and no rendezvous named: a free port is taken, so that jobs on one machine cannot meet.
- OMP_NUM_THREADS unset: the cores are shared out among the workers (torchrun: 1 each).
- The exit status: that of the worker which failed first, or 128 + its signal.
- --in-place: another agent, whose workers survive the failure of one (_in_place).
Elsewhere: keys (_run_key), who meets whom (_rendezvous, _hosts), what is started again (_attempts)
and how (_preload), the last screen (_failure_report), how the job stands (_status).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    get_error_handler,
    record,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from libddp import (
    _attempts,
    _failure_report,
    _hosts,
    _in_place,
    _launcher_flags,
    _lifeline,
    _preload,
    _rendezvous,
    _run_key,
    _standby,
    _status,
    _worker_ends,
)
from libddp._autoload import DROP_IN

#: Between looks of torch's agent, which take --monitor-interval, or until a worker ends.
SLEEP_SECONDS = 0.005

_RENDEZVOUS_FLAGS = ("rdzv_endpoint", "rdzv_id", "rdzv_backend", "master_addr", "master_port")


def parse(arguments: Sequence[str]):
    """torchrun's namespace for a command line, with libddp's defaults filled in."""
    parser = torchrun.get_args_parser()
    parser.prog = "libddp run"
    _launcher_flags.add(parser)
    args = parser.parse_args(arguments)
    named = any(getattr(args, flag) != parser.get_default(flag) for flag in _RENDEZVOUS_FLAGS)
    if args.nnodes in ("1", "1:1") and not named:
        args.standalone = True
    _launcher_flags.complete(args)
    return args


def wish_drop_in(args) -> None:
    """Tells the workers, through their environment, to install libddp as they import torch.

    Raises:
        ArgumentError: it would not reach them; the message says why.
    """
    from libddp._torch_patches.drop_in import require_automatic
    from libddp.errors import ArgumentError

    if args.no_python:
        raise ArgumentError(
            "libddp run: --drop-in replaces names in Python, and --no-python says that the workers "
            f"are something else. Hint: leave out --no-python, or put {DROP_IN}=1 into the "
            "environment of the Python that the program starts."
        )
    other = os.environ.get("PYTHON_EXEC", sys.executable)
    if shutil.which(other) != shutil.which(sys.executable):
        raise ArgumentError(
            f"libddp run: PYTHON_EXEC={other} is not the Python of this command, so it may have no "
            "libddp to drop in. Hint: unset PYTHON_EXEC, or start libddp run with that Python."
        )
    require_automatic()
    os.environ[DROP_IN] = "1"


def threads_per_worker(workers: int) -> int:
    """This process's cores, shared out; at least one each."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def require_program(args) -> None:
    """Ends here, with one line, what would end in every worker."""
    script = args.training_script
    program = script if args.no_python else os.environ.get("PYTHON_EXEC", sys.executable)
    problem = program_problem(program)
    if not problem:
        if args.module or args.no_python or args.run_path or os.path.exists(script):
            return
        program, problem = script, "no such file"
    print(f"libddp run: {program}: {problem} (from {os.getcwd()})", file=sys.stderr)
    sys.exit(2)


def program_problem(program: str) -> str:
    """Why it cannot be started; empty if it can. Without a slash PATH alone is searched."""
    if shutil.which(program):
        return ""
    if os.path.isfile(program):
        if "/" not in program:
            return f"not in PATH. Hint: ./{program}"
        return "not executable. Hint: chmod +x, or leave out --no-python if it is a Python script"
    return "no such program" if "/" in program else "no such program in PATH"


def quieten_torchrun() -> None:
    """What it logs of the first process that it saw end would be taken for the cause."""
    if "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ:
        name = "torch.distributed.elastic.multiprocessing.api"
        logging.getLogger(name).setLevel(logging.CRITICAL)


def tie_workers() -> None:
    """They know whose they are, and end with this process."""
    from libddp._torch_patches import workers_descriptors

    os.environ[_lifeline.LAUNCHER] = str(os.getpid())
    workers_descriptors.put(_lifeline.hold())


@contextlib.contextmanager
def forking(args, num_workers: int) -> Iterator[_preload.ForkServer | None]:
    """With --preload, the process that forks the workers."""
    from libddp._torch_patches import workers_descriptors

    if not args.preload:
        yield None
        return
    # In place one of them is missing, mostly; else all start again.
    num_spares = 1 if args.in_place else num_workers
    server = _preload.ForkServer(args.preload_modules.split(","), num_spares)
    try:
        workers_descriptors.start_with(server.start)
        yield server
    finally:
        server.end()


def watch_attempts(args, workers, hosts, server) -> _attempts.Attempts:
    """Makes torch's agent stop workers in time, and give up what would only fail again."""
    from libddp._torch_patches import agent_hooks

    attempts = _attempts.Attempts(workers, args.max_restarts, args.retry_same_error)
    agent_hooks.stop_within(args.shutdown_timeout, hosts.leave)
    agent_hooks.wake_at_ends(args.monitor_interval)
    args.monitor_interval = min(args.monitor_interval, SLEEP_SECONDS)
    agent_hooks.excuse_failures(hosts.excuse)
    agent_hooks.tell_ends(workers.tell)

    def meet(handler, next_rendezvous):
        attempts.check()
        if server is not None:
            server.wait_until_ready()  # hosts that train stop for this one as it comes
        info = hosts.meet(handler, next_rendezvous)
        workers.number = _rendezvous.meeting()
        return info

    agent_hooks.around_rendezvous(meet)
    return attempts


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Starts the workers and waits for them; the exit status says how they ended.

    Args:
        arguments: the command line without the program; None = this process's.

    The exit status is that of the worker that failed first: its exit code, or 128 + its signal. A
    signal that ends the job (Ctrl-C, SIGTERM) reaches the workers first, and is 128 + its number.
    """
    args = parse(sys.argv[1:] if arguments is None else arguments)
    require_program(args)
    if args.drop_in:
        wish_drop_in(args)
    if args.preload:
        _preload.check(args)
    _run_key.hand_out(args)
    _rendezvous.prepare(args)
    if args.in_place:
        _in_place.check(args)
    quieten_torchrun()
    num_workers = torchrun.determine_local_world_size(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_worker(num_workers)))
    tie_workers()
    with _worker_ends.watched() as workers, forking(args, num_workers) as server:
        hosts = _hosts.Hosts(args.node_unit, args.network_check, args.exclude_straggler)
        attempts = watch_attempts(args, workers, hosts, server)
        with _status.Status(workers, attempts, args.status_json, shows_status(args)) as status:
            supervise(args, workers, hosts, attempts, status)


def shows_status(args) -> bool:
    """Whether a line on the terminal is asked for, or disturbs nobody."""
    return args.status or (sys.stderr.isatty() and args.redirects == "3" and args.tee == "0")


def supervise(args, workers, hosts, attempts, status) -> None:
    """torch's agent, or the one of --in-place, and what is said of how it ended."""
    try:
        if args.in_place:
            _in_place.Agent(args, attempts, workers, hosts).run()
        else:
            torchrun.run(args)
    except SignalException as end:
        hosts.leave()
        hosts.linger()
        name = signal.Signals(end.sigval).name
        print(f"libddp run: ended by {name}; the workers are stopped", file=sys.stderr)
        sys.exit(128 + end.sigval)
    except _hosts.SpareEnded:
        print("libddp run: the run has ended; this host was a spare", file=sys.stderr)
    except _hosts.StragglerError:
        print("libddp run: this host leaves the run (--exclude-straggler)", file=sys.stderr)
        sys.exit(1)
    except RendezvousClosedError as end:
        told = isinstance(end, _standby.CutOffError) and str(end)
        told = told or "the launcher of another host has ended the run"
        print(f"libddp run: {told}", file=sys.stderr)
        if not workers.told:
            sys.exit(1)
        first, code = _failure_report.report(workers.failures(workers.failed()))
        status.failed(first)
        sys.exit(code)
    except ChildFailedError as failed:
        first, code = _failure_report.report(workers.failures(failed.failures), attempts.note)
        status.failed(first)
        if first.path and "TORCHELASTIC_ERROR_FILE" in os.environ:  # a launcher above this one
            get_error_handler().dump_error_file(first.path, code)
        sys.exit(code)


if __name__ == "__main__":
    main()
