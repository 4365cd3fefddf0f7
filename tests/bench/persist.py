"""How fast a save gets into its folder behind the training, and what that costs the training.

    python tests/bench/persist.py --folder=DISK [--mib=500] [--ranks=1] [--rounds=8] [--steps=20]

That many MiB (replicated: the ranks share the work) in a folder of the disk to be measured: 8
matrices of 1024 x 1024 that are trained with AdamW, with their moments, and frozen ones beside
them, so that a step is much shorter than what it takes to store a save. Two cases:

    persist  seconds from save(storage=True) to the end of wait(), in turns with "plain": rank 0
             writes as many bytes into one file, 8 MiB a time, then fsync (no O_DIRECT); and with
             torch DCP's async_save of the same tensors (over gloo), to the end of its future. What
             is dirty is synchronised before each. `ratio` = plain's time / the candidate's: 0.9 is
             90 % of the disk. mb_per_s is the median's.
    step     seconds of a training step: "quiet"; "persisting", those of the --steps after a save
             that end before it is in the folder; "beside DCP", the same for async_save; "beside
             plain", those while another process writes as many bytes plainly (`samples` in all
             rounds). `ratio` = quiet's / the candidate's; `longer` is what a step takes more, in
             percent; `lost_ms`, what these steps take more for each save; `interval_2_percent`, the
             seconds from one such save to the next at which that is 2 % of the time.

What the ranks' copying takes from the training is not in `step`: snapshot.py measures it. One JSON
line per candidate, and a table.
"""

import argparse
import itertools
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import pairing
import ranks
import table
import torch
from torch import nn

CHUNK_BYTES = 8 << 20
LAYERS = 8


class Training:
    """A few layers of a model of `mib` in all, moments included, under DDP."""

    def __init__(self, mib: int, batch: int):
        from libddp.nn.parallel import DistributedDataParallel

        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
        trained = list(net.parameters())
        for number in range(max(0, mib - 12 * LAYERS) // 4):
            frozen = nn.Parameter(torch.randn(1024, 1024), requires_grad=False)
            net.register_parameter(f"frozen_{number}", frozen)
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(trained, fused=True)
        self.num_bytes = sum(each.nbytes for each in net.parameters())
        self.num_bytes += 2 * sum(each.nbytes for each in trained)
        self._inputs = torch.randn(batch, 1024)

    def step(self) -> float:
        """Its seconds."""
        began = time.perf_counter()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began


class Saves:
    """To the folder, of steps that count up."""

    def __init__(self, folder: str, training: Training):
        import libddp

        self._folder, self._training = Path(folder, "run"), training
        self._snapshot = libddp.Snapshot(str(self._folder), linger=1)
        self._steps = itertools.count(1)
        self.last = 0

    def save(self) -> None:
        self.last = next(self._steps)
        parts = self._training.model, self._training.optimizer
        self._snapshot.save(self.last, *parts, storage=True)

    def wait(self) -> None:
        self._snapshot.wait(300)

    def save_and_wait(self) -> None:
        self.save()
        self.wait()

    def is_stored(self) -> bool:
        """A folder gets its name when the disk has all of it (docs/snapshots.md)."""
        found = self._folder.glob(f"step-{self.last}.*")
        return any(path.suffix != ".part" for path in found)

    def close(self) -> None:
        self._snapshot.close()


class DcpSaves:
    """The same tensors by torch's DCP, behind the training, over torch's gloo."""

    def __init__(self, folder: str, training: Training):
        self._folder, self._training = Path(folder, "dcp"), training
        self._group = torch.distributed.new_group(backend="gloo")
        self._future = None

    def save(self) -> None:
        from torch.distributed.checkpoint import FileSystemWriter, async_save

        state = {
            "model": self._training.model.module.state_dict(),
            "optimizer": self._training.optimizer.state_dict(),
        }
        writer = FileSystemWriter(self._folder)
        self._future = async_save(state, storage_writer=writer, process_group=self._group)

    def wait(self) -> None:
        self._future.result()

    def save_and_wait(self) -> None:
        self.save()
        self.wait()

    def is_stored(self) -> bool:
        return self._future.done()

    def close(self) -> None:
        torch.distributed.destroy_process_group(self._group)


def write_plainly(path: Path, num_bytes: int, source: torch.Tensor) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        view = memoryview(source.numpy()).cast("B")
        for _ in range(0, num_bytes, CHUNK_BYTES):
            if os.write(file, view) != CHUNK_BYTES:
                raise OSError(f"{path}: written in part only")
        os.fsync(file)
    finally:
        os.close(file)


class PlainWriter:
    """A process of its own that writes plainly when it is told to; on rank 0 only."""

    def __init__(self, path: Path, num_bytes: int):
        import libddp.distributed as dist

        self._process = None
        if dist.get_rank() != 0:
            return
        arguments = ("--write-plainly", str(path), "--bytes", str(num_bytes))
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.wait()  # it has what it writes

    def begin(self) -> None:
        if self._process:
            self._process.stdin.write("write\n")
            self._process.stdin.flush()

    def is_done(self) -> bool:
        return not self._process or bool(select.select([self._process.stdout], [], [], 0)[0])

    def wait(self) -> None:
        if self._process:
            self._process.stdout.readline()

    def close(self) -> None:
        if self._process:
            self._process.communicate()

    @staticmethod
    def serve(path: Path, num_bytes: int) -> None:
        """What the process does."""
        source = torch.randint(255, (CHUNK_BYTES,), dtype=torch.uint8)
        print(flush=True)
        for _ in sys.stdin:
            write_plainly(path, num_bytes, source)
            print(flush=True)


def compare_speed(
    saves: Saves, dcp: DcpSaves, folder: str, num_bytes: int, rounds: int, case: str
) -> list[dict]:
    """In turns; rank 0 writes plainly, while the others wait."""
    import libddp.distributed as dist

    source = torch.randint(255, (CHUNK_BYTES,), dtype=torch.uint8)
    file = Path(folder) / "plain"

    def plain() -> None:
        if dist.get_rank() == 0:
            write_plainly(file, num_bytes, source)
        dist.barrier()

    def settle() -> None:
        dist.barrier()
        file.unlink(missing_ok=True)
        os.sync()
        dist.barrier()

    candidates = {"plain": plain, "libddp": saves.save_and_wait, "torch DCP": dcp.save_and_wait}
    common = {"over_ranks": pairing.summed, "settle": settle, "warmup": 1}
    lines = pairing.compare(candidates, rounds=rounds, case=f"persist, {case}", **common)
    settle()
    return [line | {"mb_per_s": num_bytes / 1e6 / line["median"]} for line in lines]


def step_times(
    training: Training, saves: Saves, dcp: DcpSaves, plain: PlainWriter, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Of quiet steps, and of those that end while something is being stored."""
    import libddp.distributed as dist

    names = "quiet", "persisting", "beside DCP", "beside plain"
    found: dict[str, list[float]] = {name: [] for name in names}

    def steps_until(is_over) -> list[float]:
        times = ((training.step(), is_over()) for _ in range(steps))
        return [seconds for seconds, is_after in times if not is_after]

    def settle() -> None:
        os.sync()
        dist.barrier()

    for _ in range(rounds):
        for name, candidate in ("persisting", saves), ("beside DCP", dcp):
            settle()
            candidate.save()
            found[name] += steps_until(candidate.is_stored)
            candidate.wait()
        settle()
        found["quiet"] += [training.step() for _ in range(steps)]
        plain.begin()
        found["beside plain"] += steps_until(plain.is_done)
        plain.wait()
    return found


def compare_steps(found: dict[str, list[float]], rounds: int, case: str) -> list[dict]:
    quiet = found["quiet"]
    usual = statistics.mean(quiet)
    # Seconds for each save.
    lost = {name: (sum(times) - len(times) * usual) / rounds for name, times in found.items()}
    if not found["persisting"]:
        print("SKIPPED: step (each save was stored within one: --mib is too small)")
        return []
    return [
        {
            "case": f"step, {case}",
            "candidate": name,
            "min": min(times),
            "median": statistics.median(times),
            "ratio_min": pairing.ratio(quiet, times, min),
            "ratio_median": pairing.ratio(quiet, times, statistics.median),
            "longer": 100 * (statistics.median(times) / statistics.median(quiet) - 1),
            "lost_ms": round(1e3 * lost[name], 3),
            "interval_2_percent": round(max(0.0, lost[name] / 0.02), 3),
            "samples": len(times),
            "load": os.getloadavg()[0],
        }
        for name, times in found.items()
        if times
    ]


def measure(folder: str, mib: int, batch: int, rounds: int, steps: int) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    import libddp.distributed as dist

    dist.init_process_group("libddp")
    torch.set_num_threads(1)
    training = Training(mib, batch)
    for _ in range(3):
        training.step()
    saves = Saves(folder, training)
    saves.save_and_wait()
    case = f"{training.num_bytes >> 20} MiB, {dist.get_world_size()} ranks"
    dcp = DcpSaves(folder, training)
    lines = compare_speed(saves, dcp, folder, training.num_bytes, rounds, case)
    plain = PlainWriter(Path(folder) / "plain", training.num_bytes)
    found = step_times(training, saves, dcp, plain, rounds, steps)
    lines += compare_steps(found, rounds, case)
    plain.close()
    dcp.close()
    saves.close()
    dist.destroy_process_group()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="on the disk to be measured")
    parser.add_argument("--mib", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, for each rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="at most, in each round")
    parser.add_argument("--write-plainly", type=Path, help="for the process of that name")
    parser.add_argument("--bytes", type=int, default=0)
    options = parser.parse_args()
    if options.write_plainly:
        return PlainWriter.serve(options.write_plainly, options.bytes)
    folder = tempfile.mkdtemp(dir=options.folder, prefix="libddp-persist-")
    try:
        arguments = (folder, options.mib, options.batch, options.rounds, options.steps)
        lines = ranks.run(measure, options.ranks, *arguments, deadline=900)[0]
    finally:
        shutil.rmtree(folder)
    for line in lines:
        pairing.emit(line)
    columns = ["case", "candidate", "min", "median", "ratio_min", "ratio_median", "mb_per_s"]
    columns += ["longer", "lost_ms", "interval_2_percent", "samples"]
    print(table.table(lines, columns))


if __name__ == "__main__":
    main()
