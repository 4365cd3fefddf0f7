"""How long the training stands still for a save, and what a load takes.

    python tests/bench/snapshot.py [--mib 300] [--ranks 1] [--rounds 20]

A model and its AdamW moments of that many MiB in all (replicated: the ranks share the copying).
Saves take turns with memcpy (one thread), torch.save to memory (/dev/shm) and torch's DCP to the
same; loads with torch.load and DCP. JSON lines; `ratio` = memcpy's time / this one's. The first
save of a layout is a line of its own, as its pages are new.
"""

import argparse
import shutil
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


def make(mib: int):
    model = Parameters(mib)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer) -> dict:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def measure(mib: int, rounds: int, folder: str) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group

    import libddp

    init_process_group("libddp")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model, optimizer = make(mib)
    snapshot = libddp.Snapshot(folder + "/run", linger=1)
    source = torch.cat([p.detach().flatten() for p in model.parameters()]).repeat(3)
    target = torch.empty_like(source)
    file = Path(folder) / f"rank-{rank}.pt"
    case = f"{source.nbytes >> 20} MiB, {dist.get_world_size()} ranks"

    began = time.perf_counter()
    snapshot.save(0, model, optimizer)
    first = time.perf_counter() - began
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
    lines.append({"case": f"first save, {case}", "candidate": "libddp", "min": first})
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
