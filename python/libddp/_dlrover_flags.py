"""dlrover-run's flags, so that its command lines start here: some act, the others say what does.

_dlrover_flags.add(parser)
args = parser.parse_args(arguments)
_dlrover_flags.complete(args)        # one line for each that does nothing
"""

from __future__ import annotations

import argparse
import sys

from torch.distributed.argparse_util import check_env, env

#: flag -> (its type, what libddp does instead); a type of None is a switch.
WITHOUT_EFFECT = {
    "--auto-config": (
        None,
        "nothing asks a cluster here: pass --nnodes=MIN:MAX and --nproc-per-node=auto",
    ),
    "--auto-tunning": (None, "batch size and learning rate stay what the script says"),
    "--save-at-breakpoint": (None, "snapshots of libddp outlive their workers in any case"),
    "--accelerator": (str, "libddp uses the accelerator that torch finds"),
    "--training-port": (int, "libddp takes free ports; MASTER_PORT is the launchers' choice"),
    "--numa-affinity": (None, "pass torchrun's --numa-binding=node"),
    "--membind-policy": (str, "memory comes from where a worker runs; bind it by numactl"),
    "--ucp-device-type": (str, "libddp.Snapshot loads into any number of ranks, on their devices"),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Both spellings of each, as dlrover-run has them."""
    group = parser.add_argument_group("dlrover-run's flags")

    def switch(flag: str, text: str) -> None:
        group.add_argument(flag, flag[:2] + flag[2:].replace("-", "_"), action=check_env, help=text)

    switch("--network-check", "Measure the hosts before the first start; name the slow ones.")
    switch("--comm-perf-test", "The same as --network-check.")
    switch("--exclude-straggler", "Hosts that the network check finds slow leave the run.")
    group.add_argument(
        "--precheck",
        type=int,
        action=env,
        default=0,
        choices=[0, 1, 2],
        help="1 and 2: --network-check.",
    )
    group.add_argument(
        "--node_unit",
        "--node-unit",
        type=int,
        action=env,
        default=1,
        metavar="N",
        help="Run on a multiple of N hosts; what is over waits as a spare.",
    )
    for flag, (kind, instead) in WITHOUT_EFFECT.items():
        names = (flag, flag[:2] + flag[2:].replace("-", "_"))
        if kind is None:
            group.add_argument(*names, action="store_true", help=f"No effect: {instead}.")
        else:
            group.add_argument(*names, type=kind, default=None, help=f"No effect: {instead}.")


def complete(args: argparse.Namespace) -> None:
    """
    Raises:
        ArgumentError: --node_unit does not fit --nnodes, or --exclude-straggler has no check.
    """
    for flag, (kind, instead) in WITHOUT_EFFECT.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value not in (None, False):
            shown = flag if kind is None else f"{flag}={value}"
            print(f"libddp run: {shown} has no effect: {instead}", file=sys.stderr)
    args.network_check = bool(args.network_check or args.comm_perf_test or args.precheck)
    from libddp.errors import ArgumentError

    hosts = [int(number) for number in args.nnodes.split(":")]
    if args.node_unit < 1 or any(number % args.node_unit for number in hosts):
        raise ArgumentError(
            f"libddp run: --node_unit={args.node_unit} must divide both ends of "
            f"--nnodes={args.nnodes}. Hint: e.g. --nnodes={args.node_unit}:{4 * args.node_unit}."
        )
    if args.exclude_straggler and not args.network_check:
        raise ArgumentError(
            "libddp run: --exclude-straggler excludes what the network check finds. Hint: add "
            "--network-check."
        )
