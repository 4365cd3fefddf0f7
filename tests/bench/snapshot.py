"""How long the training stands still for a save, and what a load takes.

    python tests/bench/snapshot.py [--mib 300] [--ranks 1] [--rounds 20]

A model and its AdamW moments of that many MiB in all (replicated: the ranks share the copying).
Saves take turns with memcpy (one thread), torch.save to memory (/dev/shm), torch's DCP to the
same, and DLRover's to memory where the interpreter has it (else a line says that it is SKIPPED);
loads with theirs. JSON lines; `ratio` = memcpy's time / this one's. Lines of their own: the first
save, whose pages are new, after a load() that found nothing and a second of training, and without
that; and loads of a new start, into an optimizer without state, whose memory is mapped anew and
whose moments are new pages, too.

DLRover's load is what its examples do, load_checkpoint and both load_state_dict: parameters are
copied, while the moments are the shared memory itself, which the next step of the optimizer
changes. torch.load and DCP's load leave it to the script to fill an optimizer. JSON lines come
first, a table of them at the end.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import dlrover_saver
import pairing
import ranks
import table
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


class Dlrover:
    """A model and its saves to DLRover's memory."""

    def __init__(self, checkpointer, mib: int):
        self._checkpointer = checkpointer
        self._model, self._optimizer = build(mib)
        self._steps = itertools.count(1)

    def step(self) -> None:
        step(self._model, self._optimizer)

    def save(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import StorageType

        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._checkpointer.save_checkpoint(
            next(self._steps), state, storage_type=StorageType.MEMORY
        )
        dist.barrier()  # other ranks than the first do not wait for it

    def load(self) -> None:
        found = self._checkpointer.load_checkpoint()
        self._model.load_state_dict(found["model"])
        self._optimizer.load_state_dict(found["optimizer"])


def first_dlrover_save(mib: int, saver: dlrover_saver.Saver) -> float:
    """As first_save, of a job of its own."""
    with saver as checkpointer:
        its = Dlrover(checkpointer, mib)
        assert checkpointer.load_checkpoint() == {}
        its.step()
        time.sleep(1)
        return seconds_of(its.save)


def dlrover_firsts(mib: int, folder: str) -> list[float]:
    savers = [dlrover_saver.Saver(f"first-{n}", f"{folder}/dlrover-{n}") for n in range(4)]
    return [first_dlrover_save(mib, saver) for saver in savers]


def torch_candidates(model, optimizer, folder: str) -> tuple[dict, dict]:
    """torch.save and DCP to files, by all ranks; and their loads."""
    is_first = dist.get_rank() == 0
    file = Path(folder) / "torch.pt"

    def save():
        if is_first:
            torch.save(state_of(model, optimizer), file)
        dist.barrier()

    def load():
        if is_first:
            torch.load(file, weights_only=True)
        dist.barrier()

    def dcp_save():
        dcp.save(state_of(model, optimizer), checkpoint_id=folder + "/dcp")

    def dcp_load():
        dcp.load(state_of(model, optimizer), checkpoint_id=folder + "/dcp")

    return (
        {"torch.save": save, "torch DCP": dcp_save},
        {"torch.load": load, "torch DCP": dcp_load},
    )


def libddp_firsts(mib: int, folder: str) -> dict[str, list[float]]:
    firsts: dict[str, list[float]] = {"first save, unprepared": [], "first save": []}
    for number in range(3):
        for name, seconds in firsts.items():
            is_prepared = name == "first save"
            found, snapshot, *_ = first_save(mib, f"{folder}/{name}-{number}", is_prepared)
            seconds.append(found)
            snapshot.close()
    return firsts


def alternate(mib: int, rounds: int, folder: str, case: str, parts, dlrover) -> list[dict]:
    """Saves of all candidates in turns, then loads."""
    snapshot, model, optimizer = parts
    source = torch.cat([p.detach().flatten() for p in model.parameters()]).repeat(3)
    target = torch.empty_like(source)
    memcpy = {"memcpy": lambda: target.copy_(source)}
    saves = memcpy | {"libddp": lambda: snapshot.save(1, model, optimizer)}
    loads = memcpy | {"libddp": lambda: snapshot.load(model, optimizer)}
    torch_saves, torch_loads = torch_candidates(model, optimizer, folder)
    if dlrover is not None:
        dlrover.step()
        torch_saves["DLRover"] = dlrover.save
        torch_loads["DLRover"] = dlrover.load
    time.sleep(1)  # the other slot's pages come meanwhile
    common = {"rounds": rounds, "over_ranks": pairing.summed}
    lines = pairing.compare(saves | torch_saves, case=f"save, {case}", **common)
    return lines + pairing.compare(loads | torch_loads, case=f"load, {case}", **common)


def dlrover_new_starts(mib: int, checkpointer) -> list[float]:
    """Other checkpointers of the same job, into models without moments."""
    kind = type(checkpointer)
    anew = [kind(checkpointer.checkpoint_dir, comm_backend="gloo") for _ in range(4)]
    return [seconds_of(Dlrover(each, mib).load) for each in anew]


def line_of(case: str, candidate: str, seconds: list[float]) -> dict:
    numbers = {"min": min(seconds), "median": statistics.median(seconds)}
    return {"case": case, "candidate": candidate, **numbers, "load": os.getloadavg()[0]}


def measure(mib: int, rounds: int, folder: str) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.set_num_threads(1)
    has_dlrover = not dlrover_saver.why_not()
    firsts = libddp_firsts(mib, folder)
    theirs = {"first save": dlrover_firsts(mib, folder)} if has_dlrover else {}
    found, *parts = first_save(mib, folder + "/run", True)
    firsts["first save"].append(found)
    case = f"{mib // 12 * 12} MiB, {dist.get_world_size()} ranks"
    with contextlib.ExitStack() as stack:
        dlrover = None
        if has_dlrover:
            checkpointer = stack.enter_context(dlrover_saver.Saver("run", folder + "/dlrover"))
            dlrover = Dlrover(checkpointer, mib)
        lines = alternate(mib, rounds, folder, case, parts, dlrover)
        firsts["load of a new start"] = [first_load(mib, folder + "/run") for _ in range(4)]
        if has_dlrover:
            theirs["load of a new start"] = dlrover_new_starts(mib, checkpointer)
    lines += [line_of(f"{name}, {case}", "libddp", found) for name, found in firsts.items()]
    lines += [line_of(f"{name}, {case}", "DLRover", found) for name, found in theirs.items()]
    dist.barrier()
    parts[0].close()
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
        lines = ranks.run(measure, options.ranks, *arguments, deadline=900)[0]
    finally:
        shutil.rmtree(folder)
    for line in lines:
        pairing.emit(line)
    print(table.table(lines, ["case", "candidate", "min", "median", "ratio_min", "ratio_median"]))
    if reason := dlrover_saver.why_not():
        print(f"SKIPPED: DLRover ({reason})")


if __name__ == "__main__":
    main()
