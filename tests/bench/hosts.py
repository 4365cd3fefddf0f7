"""All-reduce between hosts, libddp and Gloo in alternation; the hosts are network namespaces.

    python tests/bench/hosts.py --hosts=2 --ranks-per-host=2 --rounds=20      # as root
    python tests/bench/hosts.py --gbit=1 --bytes=67108864                     # capped by tc

Rank 0 prints one JSON line per size and candidate (pairing.py), with CPU seconds of all ranks
together. `algbw` is bytes of the tensor per second, in GB/s. With a cap, `of_limit` is the share of
what an all-reduce can reach at best, where each host sends 2 (hosts - 1) / hosts of the tensor in
full TCP segments; headers count for the cap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "systems")]

import pairing  # noqa: E402 (found on the path above)
from network import Network  # noqa: E402

MIB = 1 << 20
SIZES = [8, 64 << 10, MIB, 25 * MIB, 64 * MIB]
PORT = 29500


#: Payload of a full TCP segment, and what the cap counts for it: Ethernet, IP, TCP, time stamps.
SEGMENT, FRAME = 1448, 1514


#: Settings of further groups (docs/hosts.md), with --settings; tensors in their arenas.
SETTINGS = {
    "2 sockets": {"LIBDDP_SOCKETS_PER_LINK": "2"},
    "4 sockets": {"LIBDDP_SOCKETS_PER_LINK": "4"},
    "bfloat16": {"LIBDDP_WIRE_DTYPE": "bfloat16"},
}


def group_with(settings: dict):
    import libddp.distributed as ddp_dist

    os.environ.update(settings)
    group = ddp_dist.new_group()
    for variable in settings:
        del os.environ[variable]
    return group


def limit_seconds(size: int, args) -> float:
    sent = 2 * (args.hosts - 1) / args.hosts * size * FRAME / SEGMENT
    return sent / (args.gbit * 1e9 / 8)


def measure(args) -> None:
    """On every rank: each size, Gloo first."""
    import libddp.distributed as ddp_dist
    import torch
    import torch.distributed as dist

    ddp_dist.init_process_group("libddp", timeout=timedelta(minutes=5))
    gloo = dist.new_group(backend="gloo")
    groups = {name: group_with(each) for name, each in SETTINGS.items() if args.settings}
    for size in args.bytes or SIZES:
        numel = size // 4
        theirs, ours = torch.zeros(numel), torch.zeros(numel)
        arena = ddp_dist.allocate((numel,)).zero_()
        calls = {
            "gloo": lambda t=theirs: dist.all_reduce(t, group=gloo),
            "ordinary": lambda t=ours: ddp_dist.all_reduce(t),
            "arena": lambda t=arena: ddp_dist.all_reduce(t),
        }
        for name, group in groups.items():
            own = ddp_dist.allocate((numel,), group=group).zero_()
            calls[name] = lambda t=own, g=group: ddp_dist.all_reduce(t, group=g)
        compared = pairing.compare(
            calls, rounds=args.rounds, over_ranks=pairing.summed, case="all_reduce", bytes=size
        )
        for line in compared:
            line["algbw"] = size / line["median"] / 1e9
            if args.gbit:
                line["of_limit"] = limit_seconds(size, args) / line["median"]
            if ddp_dist.get_rank() == 0:
                pairing.emit(line)
    ddp_dist.destroy_process_group()


def start(net, host: int, rank: int, args) -> subprocess.Popen:
    world = args.hosts * args.ranks_per_host
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % args.ranks_per_host),
        "MASTER_ADDR": net.addresses[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
    return subprocess.Popen([*net.inside(host), *command], env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bytes", type=int, action="append", help="sizes instead of the usual")
    parser.add_argument("--gbit", type=float, default=0.0, help="cap of each host; 0 = none")
    parser.add_argument("--settings", action="store_true", help="also other settings of the links")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return measure(args)
    with Network(args.hosts) as net, contextlib.ExitStack() as stack:
        if args.gbit:
            net.cap(f"{args.gbit}gbit")
        ranks = []
        for rank in range(args.hosts * args.ranks_per_host):
            ranks.append(start(net, rank // args.ranks_per_host, rank, args))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        failed = [rank for rank, process in enumerate(ranks) if process.wait(1800) != 0]
    if failed:
        sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main()
