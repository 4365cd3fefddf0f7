"""Seconds of training that kills cost: libddp.Snapshot and torch.save, in turns.

    python tests/chaos/goodput.py --kill-every 15 --seconds 120 --ranks 4

All legs run goodput_training.py under a launcher with --max-restarts; a worker is killed (SIGKILL)
every so many seconds. libddp: `libddp run` without and with --preload, a save to memory in each
step. torch: torchrun, the same group, torch.save of rank 0 to a file every --file-every steps.
(gloo under torchrun 2.15 on one host mostly times out in its first restart, which would be all
that is measured.) Lost seconds: the wall time of the leg without its first start, less the median
seconds of a step, with its save, times the steps that are new. The legs alternate in --rounds
parts. One JSON line each, and a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCHERS = {
    "libddp": ["libddp.run"],
    "libddp, preloaded": ["libddp.run", "--preload"],
    "torch": ["torch.distributed.run"],
}


class Leg:
    """One start of a launcher, with kills."""

    def __init__(self, peer: str, folder: Path, args: argparse.Namespace) -> None:
        self.peer, self.folder, self.args = peer, folder, args
        self.kills = 0
        folder.mkdir()

    def run(self) -> dict:
        launcher = self._launch()
        try:
            self._await(lambda: self._lines(), 120)
            began = time.monotonic()
            next_kill = began + self.args.kill_every
            while (now := time.monotonic()) < began + self.args.seconds / self.args.rounds:
                if launcher.poll() is not None:
                    raise RuntimeError((self.folder / "output.txt").read_text()[-3000:])
                if now >= next_kill:
                    self._kill_one(launcher.pid)
                    next_kill += self.args.kill_every
                time.sleep(0.01)
            ended = time.monotonic()
        finally:
            self._stop(launcher)
        return self._judge(began, ended)

    def _launch(self) -> subprocess.Popen:
        flags = ["--standalone", f"--nproc-per-node={self.args.ranks}", "--max-restarts=1000"]
        flags.append("--monitor-interval=0.1")
        config = {
            "peer": self.peer,
            "folder": str(self.folder),
            "pause": self.args.step_seconds,
            "file_every": self.args.file_every,
            "width": self.args.width,
        }
        script = [str(HERE / "goodput_training.py"), json.dumps(config)]
        with open(self.folder / "output.txt", "w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *LAUNCHERS[self.peer], *flags, *script],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _stop(self, launcher: subprocess.Popen) -> None:
        launcher.terminate()
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()

    def _kill_one(self, launcher: int) -> None:
        """Rank by rank, of those that have got as far as to say who they are."""
        rank = self.kills % self.args.ranks
        pid = int((self.folder / f"pid-{rank}").read_text())
        try:
            parent = _parent(pid)
            is_worker = launcher in (parent, _parent(parent))  # one between: the one that forks
        except OSError:
            return  # it is being started anew already
        if is_worker:
            os.kill(pid, signal.SIGKILL)
            self.kills += 1

    def _lines(self) -> list[list[str]]:
        path = self.folder / "steps.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def _await(self, condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError((self.folder / "output.txt").read_text()[-3000:])
            time.sleep(0.01)

    def _judge(self, began: float, ended: float) -> dict:
        lines = [(float(at), int(step)) for at, step in self._lines()]
        lines = [(at, step) for at, step in lines if began <= at <= ended]
        pairs = itertools.pairwise(lines)
        gaps = [b[0] - a[0] for a, b in pairs if b[1] == a[1] + 1]
        step_seconds = statistics.median(gaps)
        new = len({step for _, step in lines})
        wall = ended - began
        return {
            "peer": self.peer,
            "wall_s": round(wall, 1),
            "kills": self.kills,
            "new_steps": new,
            "repeated_steps": len(lines) - new,
            "step_s": round(step_seconds, 4),
            "lost_s": round(wall - new * step_seconds, 2),
        }


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill-every", type=float, default=15)
    parser.add_argument("--seconds", type=float, default=120, help="of each peer")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="sleep in each step")
    parser.add_argument("--file-every", type=int, default=20, help="steps, of torch.save")
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    results: dict[str, list[dict]] = {peer: [] for peer in LAUNCHERS}
    with tempfile.TemporaryDirectory(prefix="libddp-goodput-") as folder:
        for number in range(args.rounds):
            for peer in LAUNCHERS:
                found = Leg(peer, Path(folder) / f"leg-{peer.split()[-1]}-{number}", args).run()
                results[peer].append(found)
                print(json.dumps(found | {"load": os.getloadavg()[0]}), flush=True)
    print("| peer | seconds | kills | lost seconds | lost per kill | goodput |")
    print("|---|---|---|---|---|---|")
    for peer, found in results.items():
        wall, lost = (sum(each[k] for each in found) for k in ("wall_s", "lost_s"))
        kills = sum(each["kills"] for each in found)
        shares = f"{lost / max(kills, 1):.1f} | {1 - lost / wall:.1%}"
        print(f"| {peer} | {wall:.0f} | {kills} | {lost:.1f} | {shares} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
