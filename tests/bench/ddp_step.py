"""One training step of a small GPT on two ranks: no synchronisation, a bare barrier, libddp, torch
over Gloo and over libddp, libddp over Gloo, and libddp with LIBDDP_NAN_CHECK=raise.

    python tests/bench/ddp_step.py [rounds] [steps per block]

Six layers of width 256 (about 5 M parameters), batch 8 x 64, AdamW, one thread per rank. They take
turns in blocks inside one pair of processes; a block ends with a barrier, so its time is that
of the slower rank. "barrier" exchanges nothing and only waits for the other rank in every step: the
floor under any synchronous training, as each step then takes as long as its slower rank. One JSON
line per candidate, times per step; `overhead_ms` is the step's time above the one without
synchronisation, by min and by median.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import gpt
import pairing
import ranks
import torch
import torch.distributed as dist
from torch import nn

BATCH = 8


def block_of_steps(wrap, steps: int, **options):
    return gpt.block_of_steps(wrap(gpt.seeded()), steps, BATCH, **options)


def measure(rounds: int, steps: int) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import barrier, from_c10d, init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("libddp")
    gloo = dist.new_group(backend="gloo")
    torch.set_num_threads(1)

    def torch_ddp(group):
        return lambda model: nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )

    def libddp_over_gloo(model):
        group = from_c10d(dist.new_group(backend="gloo"))
        return DistributedDataParallel(model, process_group=group)

    def checking(model):
        os.environ["LIBDDP_NAN_CHECK"] = "raise"  # read where a model is wrapped
        try:
            return DistributedDataParallel(model)
        finally:
            del os.environ["LIBDDP_NAN_CHECK"]

    candidates = {
        "no sync": block_of_steps(lambda model: model, steps),
        "barrier": block_of_steps(lambda model: model, steps, meet=barrier),
        "libddp": block_of_steps(DistributedDataParallel, steps),
        "libddp, gradients checked": block_of_steps(checking, steps),
        "torch": block_of_steps(torch_ddp(gloo), steps),
        "torch on libddp": block_of_steps(torch_ddp(None), steps),
        "libddp over gloo": block_of_steps(libddp_over_gloo, steps),
    }
    lines = pairing.compare(candidates, rounds=rounds, warmup=2, case="gpt step, 2 ranks")
    dist.destroy_process_group()
    return lines


def keep_freed_memory() -> None:
    """glibc gives freed gradients back to the kernel now and then; the page faults that follow cost
    some steps of any candidate 10 ms and drown what is measured. For the ranks, not this process.
    """
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))  # glibc's largest


def main() -> None:
    keep_freed_memory()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    lines = pairing.per(ranks.run(measure, 2, rounds, steps, deadline=550)[0], steps)
    for line in pairing.above_first(lines):
        pairing.emit(line)


if __name__ == "__main__":
    main()
