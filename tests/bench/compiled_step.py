"""One training step of a small compiled GPT on two ranks, under libddp and torch.

    python tests/bench/compiled_step.py [--layers 6] [--width 256] [--batch 8] [--rounds 12]

torch.compile in the forms that scripts have: the model compiled and then wrapped, the wrapped model
compiled, and blocks compiled one by one, which are sharded then. The candidates take turns in
blocks of steps inside one pair of processes (see pairing.py), one thread per rank, AdamW. Code is
compiled in the rounds that warm up. One JSON line per candidate, times per step; `overhead_ms` is
the step's time above that of the compiled model without synchronisation, by min and by median.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import gpt
import pairing
import ranks
import torch
import torch.distributed as dist
from ddp_step import keep_freed_memory
from fsdp_step import by_block


def compiled_blocks(model):
    for block in model.blocks:
        block.compile()
    return model


def wrappers() -> dict:
    """Name -> what compiles and wraps a model; every rank makes the groups in the same order."""
    from libddp.distributed.fsdp import fully_shard
    from libddp.nn.parallel import DistributedDataParallel
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    gloo = dist.new_group(backend="gloo")
    mesh = dist.DeviceMesh.from_group(gloo, "cpu")

    def torch_ddp(model):
        return torch.nn.parallel.DistributedDataParallel(
            model, process_group=gloo, gradient_as_bucket_view=True
        )

    ours, theirs = by_block(fully_shard), by_block(torch_fully_shard, mesh=mesh)
    return {
        "no sync": torch.compile,
        "libddp, DDP(compile(net))": lambda net: DistributedDataParallel(torch.compile(net)),
        "libddp, compile(DDP(net))": lambda net: torch.compile(DistributedDataParallel(net)),
        "libddp, fully_shard": lambda net: ours(compiled_blocks(net)),
        "torch, DDP(compile(net))": lambda net: torch_ddp(torch.compile(net)),
        "torch, compile(DDP(net))": lambda net: torch.compile(torch_ddp(net)),
        "torch, fully_shard": lambda net: theirs(compiled_blocks(net)),
    }


def measure(options: argparse.Namespace) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # candidates share the code of their modules
    candidates = {
        name: gpt.block_of_steps(
            wrap(gpt.seeded(options.layers, options.width)), options.steps, options.batch
        )
        for name, wrap in wrappers().items()
    }
    lines = pairing.compare(
        candidates,
        rounds=options.rounds,
        warmup=2,
        case=f"compiled gpt step, 2 ranks, {options.layers} x {options.width}, "
        f"batch {options.batch} x {gpt.LENGTH}",
    )
    dist.destroy_process_group()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    keep_freed_memory()
    lines = pairing.per(ranks.run(measure, 2, options, deadline=1500)[0], options.steps)
    for line in pairing.above_first(lines):
        pairing.emit(line)


if __name__ == "__main__":
    main()
