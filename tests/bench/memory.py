"""What two ranks take in memory for training a GPT, measured and planned, under each engine.

    python tests/bench/memory.py [--layers 12] [--width 512] [--only NAME,...] [--optimizers ...]

Each candidate has two fresh processes. Measured is PSS (a page that two ranks map counts half for
each) without files, summed over the ranks, above what they had with torch and the group warmed up
(`base_mib`). `wrapped`: with a wrapped model; `state`: between two steps, with gradients
(parameters + gradients + optimizer state + buffers that are kept); `peak`: the most inside a step.
`..._x`: in units of the model's parameters. `plan_...` is what `libddp plan` says, `..._ratio`
measured / planned. glibc is told to give freed memory back (not with --default-malloc): otherwise
it keeps holes of what a step has freed. `cleared`: between two steps, after zero_grad().
"""

import argparse
import ctypes
import functools
import gc
import inspect
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import fsdp_step
import gpt
import ranks
import torch
import torch.distributed as dist

#: Freed blocks of 64 KiB and more go back to the kernel at once.
FRUGAL = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
STEPS = 3
#: Candidate -> the planner's name of the setting, and how many ranks it sees on a host.
PLANNED = {
    "libddp DDP": ("DDP", 2),
    "libddp ZeRO-1": ("ZeRO-1", 2),
    "libddp FULL_SHARD": ("FULL_SHARD", 2),
    "libddp SHARD_GRAD_OP": ("SHARD_GRAD_OP", 2),
    "libddp NO_SHARD": ("NO_SHARD", 2),
    "libddp fully_shard": ("FULL_SHARD", 2),
    "libddp FULL_SHARD over Gloo": ("FULL_SHARD", 1),
    "libddp SHARD_GRAD_OP over Gloo": ("SHARD_GRAD_OP", 1),
}


def wrappers() -> dict:
    """Those of the step's benchmark, and what differs in memory only."""
    from libddp.distributed import from_c10d
    from libddp.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from libddp.nn.parallel import DistributedDataParallel

    found = fsdp_step.wrappers()
    del found["no sync"]
    gloo = dist.new_group(backend="gloo")
    # What is not our host's group is gathered, as it is between hosts.
    other = from_c10d(dist.new_group(backend="gloo"))

    def sharded(strategy, group=None):
        return lambda model: FullyShardedDataParallel(
            model, group, strategy, auto_wrap_policy=fsdp_step.policy()
        )

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        found[f"libddp {strategy.name}"] = sharded(strategy)
        found[f"libddp {strategy.name} over Gloo"] = sharded(strategy, other)
    found["libddp ZeRO-1"] = DistributedDataParallel
    found["torch DDP"] = lambda model: torch.nn.parallel.DistributedDataParallel(
        model, process_group=gloo
    )
    found["torch DDP (views)"] = lambda model: torch.nn.parallel.DistributedDataParallel(
        model, process_group=gloo, gradient_as_bucket_view=True
    )
    return found


def make_optimizer(name: str, candidate: str, model):
    from libddp.optim import AdamW

    if candidate == "libddp ZeRO-1":
        return AdamW(model.parameters(), shard_over=model)
    return {"libddp": AdamW, "torch": torch.optim.AdamW}[name](model.parameters())


def has_zero() -> bool:
    from libddp.optim import AdamW

    return "shard_over" in inspect.signature(AdamW.__init__).parameters


def field(path: str, name: str) -> int:
    """Bytes of a line `name:  123 kB` of a file in /proc/self."""
    for line in Path("/proc/self", path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def own_bytes() -> int:
    """PSS without files: how many other processes use the same libraries says nothing."""
    return field("smaps_rollup", "Pss_Anon") + field("smaps_rollup", "Pss_Shmem")


def settle(options: argparse.Namespace) -> int:
    """What is this rank's, when all ranks have come here and given back what they could."""
    gc.collect()
    if not options.default_malloc:
        ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    mine = own_bytes()
    dist.barrier()
    return mine


def train(model, optimizer, tokens, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()


def peak_of(step) -> int:
    """What is this rank's where its RSS was highest. What is others' of that is the same all
    through a step, so it is subtracted as it is after it."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    step()
    highest = field("status", "VmHWM")
    dist.barrier()
    others = field("smaps_rollup", "Rss") - own_bytes()
    dist.barrier()
    return highest - others


def measure(candidate: str, optimizer_name: str, options: argparse.Namespace) -> dict:
    """On each rank, in bytes above the baseline."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.set_num_threads(1)
    gpt.VOCABULARY = options.vocabulary
    wrap = wrappers()[candidate]
    tokens = torch.randint(gpt.VOCABULARY, (options.batch, options.length))
    prepare = prepared(options)
    tiny = wrap(prepare(gpt.seeded(2, 64, 4)))
    train(tiny, make_optimizer(optimizer_name, candidate, tiny), tokens[:1], STEPS)
    del tiny
    base = settle(options)
    model = wrap(prepare(gpt.seeded(options.layers, options.width, options.heads)))
    wrapped = settle(options) - base
    optimizer = make_optimizer(optimizer_name, candidate, model)
    train(model, optimizer, tokens, STEPS)
    state = settle(options) - base
    peak = peak_of(lambda: train(model, optimizer, tokens, 1)) - base
    optimizer.zero_grad()
    cleared = settle(options) - base
    dist.destroy_process_group()
    return {"base": base, "wrapped": wrapped, "state": state, "peak": peak, "cleared": cleared}


def prepared(options: argparse.Namespace):
    """What happens to a model before it is wrapped."""
    from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    def prepare(model):
        if options.checkpointing:
            apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, gpt.Block))
        return model

    return prepare


def plans(options: argparse.Namespace, optimizer: str) -> tuple[int, dict]:
    """Bytes of the parameters, and (setting, ranks per host) -> its Memory."""
    from libddp.plan import Batch, Job, all_settings, survey, torch_optimizer

    gpt.VOCABULARY = options.vocabulary
    facts = survey(
        lambda: gpt.Gpt(options.layers, options.width, options.heads),
        Batch(options.batch, options.length),
    )
    name = {"libddp": "libddp.adamw", "torch": "adamw"}[optimizer]
    found = [
        plan
        for job in (Job(2, 2), Job(2, 1))
        for plan in all_settings(facts, job, torch_optimizer(name))
    ]
    return facts.parameter_bytes, {
        (p.setting, p.ranks_per_host): p for p in found if p.recompute == options.checkpointing
    }


def line_of(candidate: str, optimizer: str, options: argparse.Namespace, plan_of) -> dict:
    env = {} if options.default_malloc else FRUGAL
    values = ranks.run(measure, 2, candidate, optimizer, options, deadline=280, env=env)
    total = {key: sum(value[key] for value in values) for key in values[0]}
    parameters, planned = plan_of(optimizer)
    line = {
        "case": f"gpt {options.layers} x {options.width}, vocabulary {options.vocabulary}, "
        f"batch {options.batch} x {options.length}"
        + (", checkpointing" if options.checkpointing else "")
        + (", default malloc" if options.default_malloc else ""),
        "candidate": candidate,
        "optimizer": optimizer,
        "model_mib": round(parameters / 2**20, 1),
    }
    line["base_mib"] = round(total["base"] / 2**20, 1)
    for key in ("wrapped", "state", "peak", "cleared"):
        line[f"{key}_mib"] = round(total[key] / 2**20, 1)
        line[f"{key}_x"] = round(total[key] / parameters, 2)
    if plan := planned.get(PLANNED.get(candidate)):
        hosts = 2 // plan.ranks_per_host
        for key, size in (("state", plan.state_per_host), ("peak", plan.step_per_host)):
            size *= hosts
            line[f"plan_{key}_mib"] = round(size / 2**20, 1)
            line[f"{key}_ratio"] = round(total[key] / size, 3)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=gpt.LENGTH)
    parser.add_argument("--vocabulary", type=int, default=gpt.VOCABULARY)
    parser.add_argument("--checkpointing", action="store_true", help="blocks are recomputed")
    parser.add_argument("--default-malloc", action="store_true", help="glibc as it comes")
    parser.add_argument("--only", default="", help="candidates, separated by commas")
    parser.add_argument("--optimizers", default="torch,libddp")
    options = parser.parse_args()
    names = [*PLANNED, "torch DDP", "torch DDP (views)", "torch FSDP1", "torch FSDP2"]
    if not has_zero():
        names.remove("libddp ZeRO-1")
    plan_of = functools.cache(lambda optimizer: plans(options, optimizer))
    only = options.only.split(",") if options.only else names
    for candidate in [name for name in names if name in only]:
        for optimizer in options.optimizers.split(","):
            if candidate.endswith("ZeRO-1") and optimizer == "torch":
                continue
            if optimizer == "libddp" and candidate.startswith("torch"):
                continue
            print(json.dumps(line_of(candidate, optimizer, options, plan_of)), flush=True)


if __name__ == "__main__":
    main()
