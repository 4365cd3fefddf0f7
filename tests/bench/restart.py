"""From a worker's SIGKILL to the next start: all workers anew, with and without --preload, and in
place, with models that are made anew in each epoch and with those of before (rejoin).

    python tests/bench/restart.py --tries=5 [--mib=96]

One job of two ranks for each case, in which rank 1 kills itself at the end of each start. Prints
one JSON line per case, in milliseconds: to the first line of rank 0's script, which comes before
`import torch` (in place: of its main()), to the end of its first all-reduce, and to the end of its
first step, with DDP and AdamW, of so many MiB of state that a snapshot brings back.
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
import os, sys, time
first = time.monotonic()
import torch
import libddp
import libddp.distributed as dist
from libddp.nn.parallel import DistributedDataParallel
folder, layers, in_place = sys.argv[1], int(sys.argv[2]), "in-place" in sys.argv[3]
keeps, kept = "rejoin" in sys.argv[3], []

def make():
    matrices = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)]
    model = DistributedDataParallel(torch.nn.Sequential(*matrices))
    return model, torch.optim.AdamW(model.parameters(), fused=True)

@libddp.elastic.run
def main():
    begin = time.monotonic() if libddp.elastic.info().is_survivor else first
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    made = time.monotonic()
    if kept:
        kept[0].rejoin()
    model, optimizer = kept or make()
    if keeps:
        kept[:] = model, optimizer
    snapshot = libddp.Snapshot(folder, linger=10)
    step = snapshot.load(model, optimizer).get("step", 0)
    model(torch.ones(4, 1024)).mean().backward()
    optimizer.step()
    if os.environ["RANK"] == "0":
        print(f"start {begin} {made} {time.monotonic()}", flush=True)
    snapshot.save(step + 1, model, optimizer, extra={"step": step + 1})
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TORCHELASTIC_MAX_RESTARTS"]:
        snapshot.close()
        dist.destroy_process_group()
    elif os.environ["RANK"] == "1":
        print(f"killed {time.monotonic()}", flush=True)
        os.kill(os.getpid(), 9)
    elif in_place:
        dist.barrier()
    else:
        time.sleep(600)

main()
"""
NAMES = ("first_line_ms", "all_reduced_ms", "stepped_ms")


def measure(flags: list[str], case: str, tries: int, mib: int) -> list[list[float]]:
    """Milliseconds, for each name those of all tries."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "libddp.run", "--nproc-per-node=2"]
        command += [f"--max-restarts={tries}", *flags, str(script)]
        done = subprocess.run(
            [*command, f"{folder}/run", str(max(1, mib // 12)), case],
            env=os.environ | {"LIBDDP_LOG_LEVEL": "OFF", "LIBDDP_KEEPER_LOG": os.devnull},
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,
            check=True,
        )
    starts = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("start")]
    kills = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("killed")]
    pairs = zip(kills, starts[1:], strict=True)
    found = [[1e3 * (float(end) - float(kill)) for end in ends] for kill, ends in pairs]
    return [list(times) for times in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--mib", type=int, default=96)
    chosen = parser.parse_args()
    in_place = ["--preload", "--in-place"]
    for flags, rejoins in ([], 0), (["--preload"], 0), (in_place, 0), (in_place, 1):
        case = "".join(flags) + " rejoin" * rejoins
        measured = measure(flags, case, chosen.tries, chosen.mib)
        for name, found in zip(NAMES, measured, strict=True):
            row = {"bench": "restart", "flags": flags, "what": name, "load": os.getloadavg()[0]}
            row |= {"rejoins": bool(rejoins)}
            row |= {"min": round(min(found)), "median": round(statistics.median(found))}
            print(json.dumps(row | {"all": [round(value) for value in found]}), flush=True)


if __name__ == "__main__":
    main()
