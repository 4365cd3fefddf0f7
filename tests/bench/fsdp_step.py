"""One training step of a small GPT on two ranks under each kind of sharding.

    python tests/bench/fsdp_step.py [--layers 12] [--width 192] [--batch 2] [--rounds 12]
    python tests/bench/fsdp_step.py --width 8 --length 2 --batch 1   # next to no computation:
                                                                     # what the engines cost

They take turns in blocks inside one pair of processes (see pairing.py), one thread per rank, AdamW
in torch's foreach form. One JSON line per candidate, times per step; the ratios are those of
libddp's DDP to the candidate. `per_block_us`: the step above the one without synchronisation, per
block of the model.
"""

import argparse
import functools
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


def policy():
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={gpt.Block})


def by_block(function, **arguments):
    """What wraps a model in FSDP2's way."""

    def wrap(model):
        for block in model.blocks:
            function(block, **arguments)
        return function(model, **arguments)

    return wrap


def wrappers() -> dict:
    """Name -> what wraps a model; every rank makes the groups in the same order."""
    from libddp.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from libddp.nn.parallel import DistributedDataParallel
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    gloo = dist.new_group(backend="gloo")
    mesh = dist.DeviceMesh.from_group(gloo, "cpu")

    def ours(strategy):
        return lambda model: FullyShardedDataParallel(
            model, auto_wrap_policy=policy(), sharding_strategy=strategy
        )

    return {
        "libddp DDP": DistributedDataParallel,
        "no sync": lambda model: model,
        "libddp FULL_SHARD": ours(ShardingStrategy.FULL_SHARD),
        "libddp NO_SHARD": ours(ShardingStrategy.NO_SHARD),
        "libddp fully_shard": by_block(fully_shard),
        "torch FSDP1": lambda model: TorchFSDP(
            model,
            process_group=gloo,
            auto_wrap_policy=policy(),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        ),
        "torch FSDP2": by_block(torch_fully_shard, mesh=mesh),
    }


def measure(options: argparse.Namespace) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.set_num_threads(1)
    sizes = (options.layers, options.width, options.heads)
    candidates = {
        name: gpt.block_of_steps(
            wrap(gpt.seeded(*sizes)), options.steps, options.batch, options.length
        )
        for name, wrap in wrappers().items()
    }
    lines = pairing.compare(
        candidates,
        rounds=options.rounds,
        warmup=2,
        case=f"gpt step, 2 ranks, {options.layers} x {options.width}, "
        f"batch {options.batch} x {options.length}",
    )
    dist.destroy_process_group()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=gpt.LENGTH)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    keep_freed_memory()
    lines = pairing.per(ranks.run(measure, 2, options, deadline=550)[0], options.steps)
    alone = lines[1]
    for line in lines:
        for key in ("min", "median"):
            line[f"per_block_{key}_us"] = (line[key] - alone[key]) / options.layers * 1e6
        pairing.emit(line)


if __name__ == "__main__":
    main()
