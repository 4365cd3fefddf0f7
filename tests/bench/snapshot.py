"""How long the training stands still for a save, and what a load takes.

    python tests/bench/snapshot.py [--mib 300] [--ranks 1] [--rounds 20]

A model and its AdamW moments of that many MiB in all (replicated: the ranks share the copying).
Saves take turns with memcpy (one thread), torch.save to memory (/dev/shm) and torch's DCP to the
same; loads with torch.load and DCP. JSON lines; `ratio` = memcpy's time / this one's. Lines of
their own: the first save, whose pages are new, after a load() that found nothing and a second of
training, and without that; and loads of a new start, into an optimizer without state, whose
memory is mapped anew and whose moments are new pages, too.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import pairing
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn


class Parameters(nn.Module):
    """A third of `mib` in matrices: the moments are the other two."""

    def __init__(self, mib: int):
        super().__init__()
        count = max(1, mib // 12)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(1024, 1024)) for _ in range(count))


def build(mib: int):
    model = Parameters(mib)
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def step(model, optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def seconds_of(function) -> float:
    dist.barrier()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def first_save(mib: int, folder: str, is_prepared: bool):
    """Its seconds, and what has made it."""
    import libddp

    model, optimizer = build(mib)
    snapshot = libddp.Snapshot(folder, linger=1)
    if is_prepared:
        assert snapshot.load(model, optimizer) == {}
    step(model, optimizer)
    time.sleep(1)  # the rest of the training that comes before it
    seconds = seconds_of(lambda: snapshot.save(0, model, optimizer))
    return seconds, snapshot, model, optimizer


def first_load(mib: int, folder: str) -> float:
    """Of a start that has nothing mapped and no moments."""
    import libddp

    model, optimizer = build(mib)
    snapshot = libddp.Snapshot(folder, linger=1)
    return seconds_of(lambda: snapshot.load(model, optimizer))


def state_of(model, optimizer) -> dict:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def measure(mib: int, rounds: int, folder: str) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    firsts: dict[str, list[float]] = {"first save, unprepared": [], "first save": []}
    for number in range(3):
        for name, seconds in firsts.items():
            is_prepared = name == "first save"
            found, snapshot, *_ = first_save(mib, f"{folder}/{name}-{number}", is_prepared)
            seconds.append(found)
            snapshot.close()
    found, snapshot, model, optimizer = first_save(mib, folder + "/run", True)
    firsts["first save"].append(found)
    source = torch.cat([p.detach().flatten() for p in model.parameters()]).repeat(3)
    target = torch.empty_like(source)
    file = Path(folder) / f"rank-{rank}.pt"
    case = f"{source.nbytes >> 20} MiB, {dist.get_world_size()} ranks"

    time.sleep(1)  # the other slot's pages come meanwhile

    def torch_save():
        if rank == 0:
            torch.save(state_of(model, optimizer), file)
        dist.barrier()

    def torch_load():
        if rank == 0:
            torch.load(file, weights_only=True)
        dist.barrier()

    def dcp_save():
        dcp.save(state_of(model, optimizer), checkpoint_id=folder + "/dcp")

    def dcp_load():
        dcp.load(state_of(model, optimizer), checkpoint_id=folder + "/dcp")

    saves = {
        "memcpy": lambda: target.copy_(source),
        "libddp": lambda: snapshot.save(1, model, optimizer),
        "torch.save": torch_save,
        "torch DCP": dcp_save,
    }
    loads = {
        "memcpy": lambda: target.copy_(source),
        "libddp": lambda: snapshot.load(model, optimizer),
        "torch.load": torch_load,
        "torch DCP": dcp_load,
    }
    lines = pairing.compare(saves, rounds=rounds, over_ranks=pairing.summed, case=f"save, {case}")
    lines += pairing.compare(loads, rounds=rounds, over_ranks=pairing.summed, case=f"load, {case}")
    firsts["load of a new start"] = [first_load(mib, folder + "/run") for _ in range(4)]
    for name, seconds in firsts.items():
        numbers = {"min": min(seconds), "median": statistics.median(seconds)}
        lines.append({"case": f"{name}, {case}", "candidate": "libddp", **numbers})
    dist.barrier()
    snapshot.close()
    dist.destroy_process_group()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="libddp-bench-")
    try:
        arguments = (options.mib, options.rounds, folder)
        for line in ranks.run(measure, options.ranks, *arguments, deadline=900)[0]:
            pairing.emit(line)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
