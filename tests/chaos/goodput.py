"""Seconds of training that kills cost, beside torchrun (torch.save, DCP's async_save) and DLRover.

    python tests/chaos/goodput.py --kill-every 15 --seconds 120 --ranks 4
    python tests/chaos/goodput.py --peers libddp-preload,dlrover --dlrover-python venv/bin/python

All legs run goodput_training.py under a launcher with --max-restarts; a worker is killed (SIGKILL)
every so many seconds, the last one that long before the end. All store a file each --file-every
steps, libddp and DLRover also save to memory in each step:

    libddp, libddp-preload, libddp-in-place   `libddp run`, with --preload, and with --in-place too
    torch-save                                torchrun, gloo, torch's DDP, torch.save of rank 0
    torch-dcp-async                           the same, torch.distributed.checkpoint.async_save
    dlrover                                   dlrover-run, gloo, torch's DDP, DdpCheckpointer

A peer that is not installed or does not run is named by a line that begins with SKIPPED. What
torchrun and dlrover-run need to run at all is said in tests/bench/recovery_peers.py and
dlrover_run.py. The legs alternate in --rounds parts; a leg takes --seconds / --rounds and its first
start. Lost seconds: the wall time of the leg without its first start, less the median seconds of a
step, with its save, times the steps that are new; for each kill until the next one: `min`,
`median`. Where no step was made until then (`not_back`) that is only what the interval was, so a
leg with such kills wants a longer --kill-every. One JSON line each, and a table, whose last column
is lost seconds per kill over those of libddp's best leg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))

import recovery_peers  # noqa: E402


class Leg:
    """One start of a launcher, with kills."""

    def __init__(self, name: str, job: recovery_peers.Job, args: argparse.Namespace) -> None:
        self.name, self.job, self.args = name, job, args
        self.kills: list[float] = []

    def run(self) -> dict:
        self.job.await_that(self._lines, 180)
        began = time.monotonic()
        end = began + self.args.seconds / self.args.rounds
        next_kill = began + self.args.kill_every
        while (now := time.monotonic()) < end:
            if self.job.process.poll() is not None:
                raise RuntimeError(self.job.output())
            if now >= next_kill:
                if next_kill + self.args.kill_every <= end:  # what the last one costs is seen, too
                    self._kill_one()
                next_kill += self.args.kill_every
            time.sleep(0.01)
        return self._judge(began, time.monotonic())

    def _kill_one(self) -> None:
        """Rank by rank, of those that have got as far as to say who they are."""
        rank = len(self.kills) % self.args.ranks
        pid = int((self.job.folder / f"pid-{rank}").read_text() or 0)
        if self.job.is_worker(pid):  # else it is being started anew already
            os.kill(pid, signal.SIGKILL)
            self.kills.append(time.monotonic())

    def _lines(self) -> list[tuple[float, int]]:
        path = self.job.folder / "steps.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(at), int(step)) for at, step in map(str.split, lines)]

    def _judge(self, began: float, ended: float) -> dict:
        lines = [(at, step) for at, step in self._lines() if began <= at <= ended]
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(lines) if b[1] == a[1] + 1]
        step_s = statistics.median(gaps)
        new = _first_times(lines)
        wall = ended - began
        ends = [*self.kills[1:], ended]
        windows = list(zip(self.kills, ends, strict=True))
        made = [sum(kill <= at < end for at in new) for kill, end in windows]
        per_kill = [
            end - kill - step_s * steps for (kill, end), steps in zip(windows, made, strict=True)
        ] or [0.0]
        return {
            "peer": self.name,
            "wall_s": round(wall, 1),
            "kills": len(self.kills),
            "not_back": made.count(0),
            "new_steps": len(new),
            "repeated_steps": len(lines) - len(new),
            "step_s": round(step_s, 4),
            "lost_s": round(wall - len(new) * step_s, 2),
            "min": round(min(per_kill), 2),
            "median": round(statistics.median(per_kill), 2),
            "per_kill": [round(seconds, 2) for seconds in per_kill],
        }


def _first_times(lines: list[tuple[float, int]]) -> list[float]:
    """When each step was made for the first time."""
    first: dict[int, float] = {}
    for at, step in lines:
        first.setdefault(step, at)
    return list(first.values())


def run_leg(name: str, peer, folder: Path, args: argparse.Namespace) -> dict | None:
    """None, and a line that says so, where another's leg does not run."""
    config = {"pause": args.step_seconds, "file_every": args.file_every, "width": args.width}
    python = args.dlrover_python if name == "dlrover" else sys.executable
    many = {"ranks": args.ranks, "max_restarts": 1000, "python": python}
    script = HERE / "goodput_training.py"
    try:
        with recovery_peers.Job(name, peer, script, config, folder, **many) as job:
            found = Leg(name, job, args).run()
    except (RuntimeError, statistics.StatisticsError) as error:
        if peer.is_ours:
            raise
        recovery_peers.skip(name, f"{type(error).__name__}: {error}")
        return None
    print(json.dumps(found | {"load": os.getloadavg()[0]}), flush=True)
    return found


def print_table(results: dict[str, list[dict]], ours: set[str]) -> None:
    totals = {}
    for name, found in results.items():
        sums = {key: sum(each[key] for each in found) for key in found[0] if key.endswith("_s")}
        counts = ("new_steps", "repeated_steps", "not_back")
        steps = [sum(each[key] for each in found) for key in counts]
        kills = sum(each["kills"] for each in found)
        totals[name] = (kills, steps, sums, sums["lost_s"] / max(kills, 1))
    best = min((totals[name][-1] for name in ours & set(totals)), default=0)
    print("| peer | s | kills | not back | new steps | repeated | s of a step | lost s |", end="")
    print(" per kill | min | median | goodput | per kill / libddp's best |\n" + "|---" * 13 + "|")
    for name, (kills, steps, sums, lost) in totals.items():
        each = [seconds for found in results[name] for seconds in found["per_kill"]]
        step_s = statistics.median(found["step_s"] for found in results[name])
        times = f"{min(each):.1f} | {statistics.median(each):.1f}"
        print(
            f"| {name} | {sums['wall_s']:.0f} | {kills} | {steps[2]} | {steps[0]} | {steps[1]} |",
            end="",
        )
        print(f" {step_s:.3f} | {sums['lost_s']:.1f} | {lost:.1f} | {times} |", end="")
        ratio = f"{lost / best:.1f}" if best > 0 else "-"
        print(f" {1 - sums['lost_s'] / sums['wall_s']:.1%} | {ratio} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill-every", type=float, default=15)
    parser.add_argument("--seconds", type=float, default=120, help="of each peer")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="sleep in each step")
    parser.add_argument("--file-every", type=int, default=20, help="steps between stored files")
    parser.add_argument("--width", type=int, default=512)
    recovery_peers.add_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    peers = recovery_peers.chosen(args.peers, args.dlrover_python)
    results: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory(prefix="libddp-goodput-") as folder:
        for number in range(args.rounds):
            for name, peer in list(peers.items()):
                found = run_leg(name, peer, Path(folder) / f"{name}-{number}", args)
                if found is None:
                    del peers[name]
                else:
                    results.setdefault(name, []).append(found)
    print_table(results, {name for name, peer in peers.items() if peer.is_ours})
    recovery_peers.repeat_skips()
    return 0


if __name__ == "__main__":
    sys.exit(main())
