"""From a worker's SIGKILL to the next start's first step: libddp run, torchrun and dlrover-run.

    python tests/bench/restart.py --tries=3 --rounds=2 [--mib=96] [--peers=libddp,dlrover]

In each round each peer (tests/chaos/goodput.py says what they are) runs one job of two ranks, in
which rank 1 kills itself at the end of each start, after a save: libddp and DLRover to memory, the
torch peers to a file. One JSON line per peer and figure, in milliseconds from the kill: to the
first line of rank 0's script, which comes before `import torch` (in place: of its main()), to the
end of its imports, of its first all-reduce, of the import of torch._dynamo, which an optimizer
makes, and of its first step, with DDP and AdamW, of so many MiB of state that the save brings back.
A job takes (--tries + 1) starts: 1 to 8 s each on an idle machine.

Lines of their own say how long it takes a lone process, and the slower of two at once, to import
torch, torch._dynamo and libddp, in turns with the jobs; and "beyond imports", how much longer than
either `libddp` takes to its first step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import recovery_peers

POINTS = ("first line", "imported", "first all-reduce", "torch._dynamo", "first step")
LONE, TWO = "all three", "all three, two processes at once"
SCRIPT = Path(__file__).with_name("restart_training.py")
#: As restart_training.py and recovery_saves.Libddp import them.
IMPORTS = """
import time
times = [time.monotonic()]
for names in ("torch", "torch._dynamo", "libddp.distributed libddp.nn.parallel"):
    for name in names.split():
        __import__(name)
    times.append(time.monotonic())
print(*(1e3 * (end - begin) for begin, end in zip(times, times[1:], strict=False)))
"""


def import_times(processes: int) -> list[float]:
    """Milliseconds of torch, torch._dynamo, libddp and all: of that many at once, the slowest's."""
    command = [sys.executable, "-c", IMPORTS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        found = [list(map(float, each.communicate(timeout=120)[0].split())) for each in running]
    finally:
        for each in running:
            each.kill()  # no effect on those that have ended
    return max(([*times, sum(times)] for times in found), key=lambda times: times[-1])


def all_imports() -> dict[str, list[float]]:
    lone = dict(zip(("torch", "torch._dynamo", "libddp", LONE), import_times(1), strict=True))
    return {what: [value] for what, value in lone.items()} | {TWO: [import_times(2)[-1]]}


def kill_times(name: str, peer, folder: Path, chosen) -> dict[str, list[float]]:
    """Milliseconds from each kill of one job, for each of POINTS."""
    config = {"layers": max(1, chosen.mib // 12), "file_every": 1000 if memory(peer) else 1}
    python = chosen.dlrover_python if name == "dlrover" else sys.executable
    many = {"ranks": 2, "max_restarts": chosen.tries, "python": python}
    with recovery_peers.Job(name, peer, SCRIPT, config, folder, **many) as job:
        job.await_end(60.0 * (chosen.tries + 1))
    lines = [line.split() for line in (folder / "times.txt").read_text().splitlines()]
    starts = [list(map(float, words[1:])) for words in lines if words[0] == "start"]
    kills = [float(words[1]) for words in lines if words[0] == "killed"]
    if [start[-1] for start in starts] != list(range(len(starts))) or len(starts) <= chosen.tries:
        raise RuntimeError(f"steps of the starts: {[start[-1] for start in starts]}")
    found = [
        [1e3 * (at - kill) for at in start] for kill, start in zip(kills, starts[1:], strict=True)
    ]
    return {point: [times[i] for times in found] for i, point in enumerate(POINTS)}


def memory(peer) -> bool:
    return peer.saves in ("Libddp", "DlroverMemory")


def print_row(peer: str, what: str, found: list[float], load: float) -> None:
    row = {"bench": "restart", "peer": peer, "what": what, "load": round(load, 1)}
    row |= {"min": round(min(found)), "median": round(statistics.median(found))}
    print(json.dumps(row | {"all": [round(value) for value in found]}), flush=True)


def collect(peers: dict, folder: str, chosen) -> dict[str, dict[str, list[float]]]:
    """For each peer and for "imports" what was measured, and the load, over all rounds."""
    results: dict[str, dict[str, list[float]]] = {}

    def add(name: str, found: dict[str, list[float]]) -> None:
        for what, values in [*found.items(), ("load", [os.getloadavg()[0]])]:
            results.setdefault(name, {}).setdefault(what, []).extend(values)

    for number in range(chosen.rounds):
        add("imports", all_imports())
        for name, peer in list(peers.items()):
            try:
                add(name, kill_times(name, peer, Path(folder) / f"{name}-{number}", chosen))
            except RuntimeError as error:
                if peer.is_ours:
                    raise
                recovery_peers.skip(name, str(error))
                del peers[name]
    return results


def print_table(results: dict[str, dict[str, list[float]]]) -> None:
    print("\n| s from the kill, min / median | " + " | ".join(POINTS) + " |")
    print("|---" * (len(POINTS) + 1) + "|")
    for name, found in results.items():
        if name != "imports":
            times = [[value / 1e3 for value in found[point]] for point in POINTS]
            cells = [f"{min(each):.2f} / {statistics.median(each):.2f}" for each in times]
            print(f"| {name} | " + " | ".join(cells) + " |")


def print_all(results: dict[str, dict[str, list[float]]]) -> None:
    for name, found in results.items():
        load = statistics.median(found.pop("load"))
        for what, values in found.items():
            print_row(name, what, values, load)
        if name == "libddp":
            for imports in (LONE, TWO):
                its = statistics.median(results["imports"][imports])
                beyond = [value - its for value in found["first step"]]
                print_row(name, f"first step, beyond imports: {imports}", beyond, load)
    print_table(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=3, help="kills in each job")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mib", type=int, default=96)
    recovery_peers.add_options(parser)
    chosen = parser.parse_args()
    peers = recovery_peers.chosen(chosen.peers, chosen.dlrover_python)
    with tempfile.TemporaryDirectory(prefix="libddp-restart-") as folder:
        results = collect(peers, folder, chosen)
    print_all(results)
    recovery_peers.repeat_skips()


if __name__ == "__main__":
    main()
