"""What sharding costs the thread that trains, per block of a model with next to no arithmetic.

    python tests/bench/fsdp_engine.py [--rounds 40] [--steps 5] [--layers 12] [--width 8]

Two ranks, one thread each, forward and backward without an optimizer; the candidates take turns
inside one pair of processes (see pairing.py). CPU times are those of rank 0's training thread: its
hooks, copies and calls, not what threads of the process group do meanwhile. One JSON line per
candidate, times per step; `us_per_block`: that CPU time above the bare model's, per block
(`..._median`: of the medians).
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import gpt
import pairing
import ranks
import torch
import torch.distributed as dist
from ddp_step import keep_freed_memory
from fsdp_step import wrappers


def block_of_steps(model, steps: int):
    """A callable that runs forward and backward `steps` times and meets the other rank."""
    parameters = list(model.parameters())
    tokens = torch.randint(gpt.VOCABULARY, (1, 2))

    def run():
        for _ in range(steps):
            model(tokens).backward()
            for parameter in parameters:
                parameter.grad = None
        dist.barrier()

    return run


def measure(options: argparse.Namespace) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.set_num_threads(1)
    wraps = wrappers()
    names = ["no sync", *(name for name in wraps if name != "no sync")]
    lines = pairing.compare(
        {
            name: block_of_steps(
                wraps[name](gpt.seeded(options.layers, options.width)), options.steps
            )
            for name in names
        },
        rounds=options.rounds,
        cpu_clock=time.thread_time,
        case=f"sharding engine, 2 ranks, {options.layers} x {options.width}",
    )
    dist.destroy_process_group()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=8)
    options = parser.parse_args()
    keep_freed_memory()
    lines = pairing.per(ranks.run(measure, 2, options, deadline=550)[0], options.steps)
    for line in lines:
        for key, of in (("cpu_min_s", "us_per_block"), ("cpu_s", "us_per_block_median")):
            line[of] = (line[key] - lines[0][key]) / options.layers * 1e6
        pairing.emit(line)


if __name__ == "__main__":
    main()
