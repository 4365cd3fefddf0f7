"""`libddp run`, `libddp-run`, `python -m libddp.run`: torchrun's flags and environment.

    libddp run --nproc-per-node=2 train.py --its=arguments

A thin layer over torch.distributed.run with two defaults of its own:
- One node and no rendezvous named: a free port is taken, so that jobs on one machine cannot meet.
- OMP_NUM_THREADS unset: the cores are shared out among the workers (torchrun: 1 each).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import record

_RENDEZVOUS_FLAGS = ("rdzv_endpoint", "rdzv_id", "rdzv_backend", "master_addr", "master_port")


def parse(arguments: Sequence[str]):
    """torchrun's namespace for a command line, with libddp's defaults filled in."""
    parser = torchrun.get_args_parser()
    parser.prog = "libddp run"
    args = parser.parse_args(arguments)
    named = any(getattr(args, flag) != parser.get_default(flag) for flag in _RENDEZVOUS_FLAGS)
    if args.nnodes in ("1", "1:1") and not named:
        args.standalone = True
    return args


def threads_per_worker(workers: int) -> int:
    """This process's cores, shared out; at least one each."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Starts the workers and waits for them; the exit status says how they ended.

    Args:
        arguments: the command line without the program; None = this process's.

    A signal that ends the job (Ctrl-C, SIGTERM) reaches the workers first; the exit status is then
    128 + its number, as a shell has it.
    """
    args = parse(sys.argv[1:] if arguments is None else arguments)
    workers = torchrun.determine_local_world_size(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_worker(workers)))
    try:
        torchrun.run(args)
    except SignalException as end:
        name = signal.Signals(end.sigval).name
        print(f"libddp run: ended by {name}; the workers are stopped", file=sys.stderr)
        sys.exit(128 + end.sigval)


if __name__ == "__main__":
    main()
