"""What sharding costs on one rank beside torch's fully_shard: host time, copies, memory.

    python tests/bench/gpu_fsdp.py [--rounds 40] [--steps 4]

Host time: blocks with the parameters of one of GPT-2 and next to no work, so that a step takes as
long as the host needs; `us_per_block` is that above the bare model's (median of the rounds'
differences). Copies and memory: GPT-2 124M whose parameters are
bf16 already, so that nothing is cast; `moved_bytes` are those of operators that only move elements,
above the bare model's, in parts of the parameters' bytes too (torch's FSDP2: 6).
"""

import gc
import statistics
import time

import gpu
import pairing
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard


def wrappers(device, group) -> dict:
    from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
    from libddp.distributed.fsdp import fully_shard
    from libddp.distributed.fsdp.wrap import ModuleWrapPolicy

    mesh = DeviceMesh.from_group(group, device.type)

    def by(function, **options):
        def wrap(model):
            for block in model.blocks:
                function(block, **options)
            return function(model, **options) or model

        return wrap

    def wrapped(model):
        kind = {type(model.blocks[0])}
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy(kind), device_id=device)

    return {
        "bare": lambda model: model,
        "libddp fully_shard": by(fully_shard),
        "libddp, plain tensors": by(fully_shard, use_dtensor=False),
        "libddp FSDP": wrapped,
        "torch fully_shard": by(torch_fully_shard, mesh=mesh),
    }


def step_of(model, x, y):
    parameters = list(model.parameters())

    def step():
        model(x, y)[1].backward()
        for parameter in parameters:
            parameter.grad = None

    return step


class Block(nn.Module):
    """As many parameters as a block of GPT-2 has, and next to no work: one kernel forward."""

    def __init__(self):
        super().__init__()
        for number in range(12):
            self.register_parameter(f"p{number}", nn.Parameter(torch.ones(8)))

    def forward(self, x):
        return x + torch.cat(list(self.parameters(recurse=False))).sum()


class Chain(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, _):
        for block in self.blocks:
            x = block(x)
        return None, x.sum()


def host_time(device, options, group) -> list[dict]:
    """Each round's time above the bare model's in the same round: what drifts is in both."""
    x = torch.ones(4, device=device)

    def block(wrap):
        with device:
            step = step_of(wrap(Chain(options.layers)), x, x)
        return gpu.block(step, options.steps, device)

    steps = {name: block(wrap) for name, wrap in wrappers(device, group).items()}
    samples = pairing.sample(steps, options.rounds, 1, 3, time.thread_time, lambda: None)
    per_block = 1e6 / (options.steps * options.layers)
    lines = []
    for name, taken in samples.items():
        over = [mine[0] - bare[0] for mine, bare in zip(taken, samples["bare"], strict=True)]
        lines.append(
            {
                "case": f"host time, {options.layers} blocks",
                "candidate": name,
                "us_per_step": statistics.median(wall for wall, _ in taken) / options.steps * 1e6,
                "us_per_block": statistics.median(over) * per_block,
                "us_per_block_of_min": (
                    min(wall for wall, _ in taken) - min(wall for wall, _ in samples["bare"])
                )
                * per_block,
            }
        )
    return lines


def costs(device, options, group) -> list[dict]:
    batch, lines = gpu.tokens(device, options), []
    for name, wrap in wrappers(device, group).items():
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        begin = allocated(device)
        model = wrap(gpu.gpt2(device, options, torch.bfloat16))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        step = step_of(model, *batch)
        step()
        seen = gpu.activity(step, device, name)
        peak = peak_of(step, device) - begin
        lines.append(
            {
                "case": "copies and memory",
                "candidate": name,
                "kernels": seen.kernels - (lines[0]["kernels"] if lines else 0),
                "copied_bytes": seen.copied_bytes,
                "moved_bytes": seen.moved_bytes - (lines[0]["moved_bytes"] if lines else 0),
                "peak_MiB": peak / 2**20,
                "parameters_MiB": size / 2**20,
            }
        )
        lines[-1]["moved_parts"] = lines[-1]["moved_bytes"] / size
        del model, step
    return lines


def allocated(device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak_of(step, device) -> int:
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    options = gpu.parser(__doc__, rounds=40, steps=4, batch=4, **gpu.GPT2).parse_args()
    device = gpu.begin(options)
    group = gpu.alone(device)
    lines = host_time(device, options, group)
    gpu.emit(lines)
    rows = gpu.by_name(lines)
    for name in ("libddp fully_shard", "libddp FSDP"):
        us = rows[name]["us_per_block"]
        gpu.target(f"G6 {name}, host us per block", "<= 100", us, met=us <= 100)
    lines = costs(device, options, group)
    gpu.emit(lines)
    rows = gpu.by_name(lines)
    theirs = rows["torch fully_shard"]["peak_MiB"]
    for name in ("libddp fully_shard", "libddp FSDP"):
        moved, peak = rows[name]["moved_parts"], rows[name]["peak_MiB"]
        gpu.target(f"G6 {name}, parameters' bytes copied", "0", moved, met=moved <= 0.01)
        ratio = peak / theirs if theirs else 1.0
        gpu.target(f"G6 {name}, peak memory / FSDP2's", "<= 1", ratio, met=ratio <= 1)


if __name__ == "__main__":
    main()
