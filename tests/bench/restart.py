"""From a worker's SIGKILL to the first line of its script in the next start, with and without
--preload.

    python tests/bench/restart.py --tries=5

One job of two ranks for each case, in which rank 1 kills itself at the end of each start. Prints
one JSON line per case, in milliseconds: to the first line of rank 0's script, which comes before
`import torch`, and to the end of its first all-reduce.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import os, time
first = time.monotonic()
import torch
import libddp.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
made = time.monotonic()
if os.environ["RANK"] == "0":
    print(f"start {first} {made}", flush=True)
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TORCHELASTIC_MAX_RESTARTS"]:
    dist.destroy_process_group()
elif os.environ["RANK"] == "1":
    print(f"killed {time.monotonic()}", flush=True)
    os.kill(os.getpid(), 9)
else:
    time.sleep(600)
"""


def measure(flags: list[str], tries: int) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "libddp.run", "--nproc-per-node=2"]
        done = subprocess.run(
            [*command, f"--max-restarts={tries}", *flags, str(script)],
            env=os.environ | {"LIBDDP_LOG_LEVEL": "OFF"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        )
    starts = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("start")]
    kills = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("killed")]
    pairs = zip(kills, starts[1:], strict=True)
    found = [[1e3 * (float(end) - float(kill)) for end in ends] for kill, ends in pairs]
    return [first for first, _ in found], [made for _, made in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=5)
    tries = parser.parse_args().tries
    for flags in ([], ["--preload"]):
        names = ("first_line_ms", "all_reduced_ms")
        for name, found in zip(names, measure(flags, tries), strict=True):
            row = {"bench": "restart", "flags": flags, "what": name, "load": os.getloadavg()[0]}
            row |= {"min": round(min(found)), "median": round(statistics.median(found))}
            print(json.dumps(row | {"all": [round(value) for value in found]}), flush=True)


if __name__ == "__main__":
    main()
