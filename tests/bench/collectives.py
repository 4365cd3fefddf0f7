"""libddp against torch's Gloo, in one job: two groups over the same processes, in turns.

    python -m libddp run --nproc-per-node=2 tests/bench/collectives.py --quick

For each operation, dtype and size four candidates alternate: "gloo" (torch, Gloo), "ordinary"
(libddp on plain tensors), "arena" (libddp on tensors of `allocate`) and "through torch" (torch's
functions on backend "libddp", plain tensors). Rank 0 prints one JSON line each (see pairing.py);
`ratio_*` = how many times faster than Gloo, `cpu_ratio_*` = how many times less CPU time of all
ranks together. algbw_GBps counts the bytes of the buffer once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import libddp.distributed as ddp_dist
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import pairing

KIB, MIB = 1 << 10, 1 << 20
SIZES = [8, 4 * KIB, 64 * KIB, MIB, 25 * MIB, 64 * MIB]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cases(quick: bool):
    """(operation, dtype name, bytes of the full buffer)."""
    sizes = [8, 64 * KIB, 25 * MIB] if quick else SIZES
    for size in sizes:
        for dtype in ["float32"] if quick else DTYPES:
            yield "all_reduce", dtype, size
        if size >= KIB:
            yield "reduce_scatter", "float32", size
            yield "all_gather", "float32", size
            yield "broadcast", "float32", size
            yield "all_to_all", "float32", size


def candidate(api, group, operation: str, full: torch.Tensor, other: torch.Tensor):
    part = other[: max(1, full.numel() // dist.get_world_size())]
    if operation == "all_reduce":
        return lambda: api.all_reduce(full, group=group)
    if operation == "reduce_scatter":
        return lambda: api.reduce_scatter_tensor(part, full, group=group)
    if operation == "broadcast":
        return lambda: api.broadcast(full, 0, group=group)
    if operation == "all_to_all":
        return lambda: api.all_to_all_single(other, full, group=group)
    return lambda: api.all_gather_into_tensor(full, part, group=group)


def candidates(gloo, operation: str, dtype: torch.dtype, size: int) -> dict:
    """The four ways, each on buffers of its own. Zeros: sums stay finite."""
    world = dist.get_world_size()
    numel = max(1, size // torch.empty(0, dtype=dtype).element_size() // world * world)

    def plain():
        return torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)

    arena = [ddp_dist.allocate(t.shape, dtype=dtype).zero_() for t in plain()]
    return {
        "gloo": candidate(dist, gloo, operation, *plain()),
        "ordinary": candidate(ddp_dist, None, operation, *plain()),
        "arena": candidate(ddp_dist, None, operation, *arena),
        "through torch": candidate(dist, None, operation, *plain()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes, float32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="these operations, e.g. all_gather")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ddp_dist.init_process_group("gloo")
    gloo = dist.new_group(backend="gloo")
    for operation, dtype, size in cases(arguments.quick):
        if arguments.only and operation not in arguments.only:
            continue
        repeat = 200 if size <= 64 * KIB else 20 if size <= MIB else 2
        ddp_dist.barrier()
        lines = pairing.compare(
            candidates(gloo, operation, DTYPES[dtype], size),
            rounds=arguments.rounds,
            repeat=repeat,
            over_ranks=pairing.summed,
            operation=operation,
            dtype=dtype,
            size_bytes=size,
            ranks=dist.get_world_size(),
        )
        for line in lines if dist.get_rank() == 0 else []:
            pairing.emit(line | {"algbw_GBps": size / line["median"] / 1e9})
    ddp_dist.destroy_process_group()


if __name__ == "__main__":
    main()
