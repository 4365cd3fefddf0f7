"""What sharding costs the host per block: hooks, copies, calls, with collectives that do nothing.

    python tests/bench/fsdp_engine.py [--rounds 60] [--layers 12] [--width 8]

One process that believes to be rank 0 of 2 on torch's "fake" process group, one thread, blocks with
next to no arithmetic; no optimizer. libddp's engine is over `from_c10d`, so it gathers each unit,
which it does not do on one host. One JSON line per candidate; `us_per_block` is the CPU time of a
step above that of the bare model, per block (`..._median`: of the medians).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpt
import pairing
import torch
import torch.distributed as dist
from ddp_step import keep_freed_memory
from fsdp_step import by_block, policy


def wrappers() -> dict:
    from libddp.distributed import from_c10d
    from libddp.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    world = dist.group.WORLD
    mesh = dist.DeviceMesh.from_group(world, "cpu")
    from_c10d(world)
    return {
        "bare": lambda model: model,
        "libddp FSDP": lambda model: FullyShardedDataParallel(model, auto_wrap_policy=policy()),
        "libddp fully_shard": by_block(fully_shard, mesh=mesh),
        "torch FSDP1": lambda model: TorchFSDP(
            model,
            auto_wrap_policy=policy(),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        ),
        "torch FSDP2": by_block(torch_fully_shard, mesh=mesh),
    }


def step(model, tokens):
    parameters = list(model.parameters())

    def run():
        model(tokens).backward()
        for parameter in parameters:
            parameter.grad = None

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=8)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tokens = torch.randint(gpt.VOCABULARY, (1, 2))
    candidates = {
        name: step(wrap(gpt.seeded(options.layers, options.width)), tokens)
        for name, wrap in wrappers().items()
    }
    case = f"sharding engine, {options.layers} x {options.width}, fake collectives"
    lines = pairing.compare(candidates, rounds=options.rounds, repeat=2, warmup=3, case=case)
    for line in lines:
        for key, of in (("cpu_min_s", "us_per_block"), ("cpu_s", "us_per_block_median")):
            line[of] = (line[key] - lines[0][key]) / options.layers * 1e6
        pairing.emit(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
