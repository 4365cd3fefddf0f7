"""Runs a training script of examples/ whose rank 1 is killed once, and notes each loss.

    python killed_once.py examples/nanogpt/train.py report.Report.stepped 9 --max_iters=20

At the ninth call of that method in the first start, rank 1 gets SIGKILL. The others end of that and
not of the launcher's SIGTERM, for which a script may save more than it has in its snapshots. What
each call returns, or its last argument, is the loss of a step: rank R of start S writes it to
losses-S-R, a line a call.

    output = killed_once.run(folder, script, "report.Report.stepped", 9, ["--max_iters=20"])
    repeated = killed_once.repeated(folder, start=6)      # of rank 0 and of rank 1
"""

import importlib
import os
import runpy
import signal
import sys
from pathlib import Path


def run(folder, script, method: str, call: int, arguments) -> str:
    """Under `libddp run --max-restarts`, which must end well; what it printed."""
    from launches import finish, launch

    command = ["-m", "libddp.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--preload", "--monitor-interval=0.1", __file__, script, method, call, *arguments]
    ((status, output),) = finish(launch(command, folder), deadline=300)
    assert status == 0, output
    return output


def repeated(folder, start: int) -> list[list[tuple[str, str]]]:
    """Of each rank: losses of the steps from `start` on, in the first start and in the second."""
    pairs = []
    for rank in (0, 1):
        first, second = (_lines(folder / f"losses-{number}-{rank}") for number in (0, 1))
        pairs.append(list(zip(first[start:], second, strict=False)))
    return pairs


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def main() -> None:
    script, method, call = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    sys.argv[:4] = [str(script)]
    sys.path[0] = str(script.parent)
    module, owner, name = method.split(".")
    _watch(getattr(importlib.import_module(module), owner), name, call)
    runpy.run_path(str(script), run_name="__main__")


def _watch(owner: type, name: str, call: int) -> None:
    original, calls = getattr(owner, name), 0
    rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    path = Path(f"losses-{start}-{rank}").resolve()

    def watched(self, *arguments, **named):
        nonlocal calls
        calls += 1
        if (rank, start) == ("1", "0") and calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        if start == "0" and calls == call - 1:  # before rank 1 can come to the next one
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        result = original(self, *arguments, **named)
        loss = arguments[-1] if result is None else result
        with open(path, "a") as file:
            print(loss.item().hex(), file=file)
        return result

    setattr(owner, name, watched)


if __name__ == "__main__":
    main()
