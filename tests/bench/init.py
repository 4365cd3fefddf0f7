"""Time of init_process_group: libddp against torch's Gloo, in turns, for several world sizes.

    python tests/bench/init.py --ranks 2 8 32 64 --rounds 5

The ranks are forked from one process that has imported everything, start together and meet over a
TCPStore of rank 0. What counts is the time from the common start until the slowest rank returns
from init_process_group. One JSON line per world size and candidate (see pairing.py); `ratio_*` =
how many times faster than Gloo, `per_rank` = median / ranks, cpu_* = all ranks together.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing import Barrier, Pipe
from pathlib import Path

import libddp.distributed as ddp_dist
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import pairing

TIMEOUT = timedelta(seconds=120)
INITS = {
    "gloo": lambda **where: dist.init_process_group("gloo", timeout=TIMEOUT, **where),
    "libddp": lambda **where: ddp_dist.init_process_group("gloo", timeout=TIMEOUT, **where),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_main(candidate: str, rank: int, ranks: int, port: int, start, result) -> None:
    """In a forked child: meets, reports (end of the wall time, CPU seconds), leaves."""
    try:
        start.wait()
        cpu = time.process_time()
        INITS[candidate](init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        result.send((time.monotonic(), time.process_time() - cpu))
        # The store is rank 0's: nobody leaves before all are through.
        start.wait()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def time_once(candidate: str, ranks: int) -> tuple[float, float]:
    """Wall seconds until the slowest rank is in, CPU seconds of all."""
    start, port = Barrier(ranks + 1), free_port()
    children, ends = [], []
    for rank in range(ranks):
        receiver, sender = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            rank_main(candidate, rank, ranks, port, start, sender)
        sender.close()
        children.append(pid)
        ends.append(receiver)
    start.wait()
    begin = time.monotonic()
    finished = [end.recv() for end in ends]
    start.wait()
    for pid in children:
        if os.waitpid(pid, 0)[1] != 0:
            raise SystemExit(f"a rank of {candidate} failed")
    return max(at for at, _ in finished) - begin, sum(cpu for _, cpu in finished)


def compare(ranks: int, rounds: int) -> list[dict]:
    samples = {candidate: [] for candidate in INITS}
    for number in range(rounds):
        for candidate in sorted(INITS, reverse=number % 2 == 1):
            samples[candidate].append(time_once(candidate, ranks))
    walls = {candidate: [wall for wall, _ in values] for candidate, values in samples.items()}
    return [
        {
            "operation": "init_process_group",
            "ranks": ranks,
            "candidate": candidate,
            "min": min(walls[candidate]),
            "median": statistics.median(walls[candidate]),
            "per_rank": statistics.median(walls[candidate]) / ranks,
            "cpu_s": statistics.median(cpu for _, cpu in samples[candidate]),
            "ratio_min": min(walls["gloo"]) / min(walls[candidate]),
            "ratio_median": statistics.median(walls["gloo"]) / statistics.median(walls[candidate]),
            "rounds": rounds,
            "load": round(os.getloadavg()[0], 2),
            "cores": os.cpu_count(),
        }
        for candidate in INITS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        for line in compare(ranks, arguments.rounds):
            pairing.emit(line)


if __name__ == "__main__":
    main()
