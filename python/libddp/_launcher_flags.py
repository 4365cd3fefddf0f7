"""The flags that `libddp run` has beside torchrun's.

_launcher_flags.add(parser)
args = parser.parse_args(arguments)
_launcher_flags.complete(args)       # defaults that depend on the environment
"""

from __future__ import annotations

import argparse
import contextlib
import os

from libddp import _dlrover_flags, _in_place, _preload

#: From SIGTERM to SIGKILL; torchrun: 30.
SHUTDOWN_SECONDS = 10


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drop-in",
        "--drop_in",
        action="store_true",
        help="Put libddp in the place of torch's process group and DistributedDataParallel, for "
        "scripts that name only torch.",
    )
    parser.add_argument(
        "--run-key-file",
        "--run_key_file",
        metavar="FILE",
        help="A secret of 32 bytes or more, the same on all hosts, mode 0600: only who has it can "
        "join the run. One host needs none.",
    )
    parser.add_argument(
        "--retry-same-error",
        "--retry_same_error",
        action="store_true",
        help="Start the workers again (--max-restarts) also where they failed twice with the same "
        "error at the same place.",
    )
    parser.add_argument(
        "--preload",
        action="store_true",
        help="Fork the workers from a process that has imported torch and libddp: a restart takes "
        "tenths of a second less import.",
    )
    parser.add_argument(
        "--preload-modules",
        "--preload_modules",
        metavar="NAMES",
        default=_preload.MODULES,
        help=f"What --preload imports, with commas between (default: {_preload.MODULES}).",
    )
    parser.add_argument(
        "--in-place",
        "--in_place",
        action="store_true",
        help="When a worker fails, the others keep their processes: programs with "
        "@libddp.elastic.run, or libddp::rejoin in C++.",
    )
    parser.add_argument(
        "--rejoin-timeout",
        "--rejoin_timeout",
        type=int,
        default=_in_place.REJOIN_SECONDS,
        metavar="SECONDS",
        help="For a worker to come to the next epoch, before it is ended and replaced (default: "
        f"{_in_place.REJOIN_SECONDS}).",
    )
    with contextlib.suppress(argparse.ArgumentError):  # torch 2.15 has it
        parser.add_argument(
            "--shutdown-timeout",
            "--shutdown_timeout",
            type=int,
            help="Seconds from SIGTERM to SIGKILL for workers that are stopped.",
        )
    parser.add_argument(
        "--status-json",
        "--status_json",
        metavar="FILE",
        help="Keep how the job stands in this file, anew each second: ranks, steps, restarts, the "
        "last failure.",
    )
    parser.add_argument(
        "--status",
        action="store_true",
        help="A line of the same on stderr each second; without the flag on a terminal, if "
        "--redirects=3 keeps the workers' output from it.",
    )
    _dlrover_flags.add(parser)


def complete(args: argparse.Namespace) -> None:
    """
    Raises:
        ArgumentError: flags that do not go together.
    """
    _dlrover_flags.complete(args)
    if args.shutdown_timeout is None:
        given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        args.shutdown_timeout = int(given) if given else SHUTDOWN_SECONDS
