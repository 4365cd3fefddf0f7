"""One step, on one rank: trains a few iterations, and rank 0 prints memory and time as JSON.

    libddp run --nproc-per-node=2 measure.py --steps=bf16

limits.py starts it once for each step: only a fresh process has a peak of its own.
"""

import contextlib
import json
import resource
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from borrowed import (
    GPT,
    GPTConfig,
    Ranks,
    UserError,
    engine,
    gather,
    meet,
    memory_mib,
    parse,
    run_script,
)
from libddp.distributed import barrier, destroy_process_group
from libddp.nn.parallel import DistributedDataParallel as DDP
from libddp.utils.checkpoint import checkpoint_sequential
from steps import LimitSettings, Step, check, find
from torch import nn

MARK = "limits: "


class SegmentedGPT(GPT):
    """Keeps only what enters a segment of blocks, and computes the rest anew in backward."""

    def __init__(self, config: GPTConfig, run):
        super().__init__(config)
        self._run = run

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(self.blocks, input=x)


def build(settings: LimitSettings, step: Step, ranks: Ranks) -> nn.Module:
    """The network of a step, wrapped. Raises: UserError if the engine cannot do it here."""
    config = GPTConfig(
        settings.vocab_size, settings.block_size, settings.n_layer, settings.n_head, settings.n_embd
    )
    run = partial(checkpoint_sequential, segments=settings.segments, use_reentrant=False)
    torch.manual_seed(1)
    net = SegmentedGPT(config, run) if step.recompute else GPT(config)
    if not step.fsdp:
        index = [ranks.device.index] if ranks.device.type == "cuda" else None
        return DDP(net.to(ranks.device), device_ids=index)
    options = SimpleNamespace(
        sharding_strategy="FULL_SHARD",
        mixed_precision="bf16" if step.bf16 else "fp32",
        cpu_offload=step.offload,
        limit_all_gathers=True,
    )
    return engine.wrap(engine.load(settings.engine), net, options, ranks.device)


def iterate(
    model: nn.Module, optimizer, settings: LimitSettings, step: Step, ranks: Ranks
) -> float:
    """One iteration on tokens that are always the same; return this rank's loss."""
    draw = torch.Generator().manual_seed(ranks.rank)
    shape = (settings.batch_size, settings.block_size + 1)
    rows = torch.randint(0, settings.vocab_size, shape, generator=draw)
    if ranks.device.type == "cuda":
        rows = rows.pin_memory()
    rows = rows.to(ranks.device, non_blocking=True)
    parts, total = settings.micro_steps if step.accumulate else 1, 0.0
    # FSDP casts by itself, in its all-gathers.
    amp = step.bf16 and not step.fsdp
    for number, part in enumerate(rows.chunk(parts), 1):
        # The last part reduces for all. FSDP reduces each: whole gradients would not be sharded.
        waits = number < parts and not step.fsdp
        with model.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast(ranks.device.type, torch.bfloat16, enabled=amp):
                loss = model(part[:, :-1], part[:, 1:])[1] / parts
            loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def limit_memory(mib: int) -> None:
    """From here on the process gets `mib` more of private memory, and then torch's error for none.

    Linux counts what is writable and not shared: libddp's arena, which all ranks share, is not.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    now = next(line for line in status.splitlines() if line.startswith("VmData:"))
    limit = int(now.split()[1]) * 1024 + mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def measure(settings: LimitSettings, step: Step, ranks: Ranks) -> dict:
    """What a step needs. Memory is that of the rank that needs most."""
    before = memory_mib(ranks.device)
    if settings.limit_mib:
        limit_memory(settings.limit_mib)
    model = build(settings, step, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    once = partial(iterate, model, optimizer, settings, step, ranks)
    losses = [once()]
    barrier()
    began = time.perf_counter()
    losses += [once() for _ in range(settings.iterations)]
    seconds = (time.perf_counter() - began) / settings.iterations
    peak = memory_mib(ranks.device)
    table = gather([peak - before, peak, seconds, losses[0], losses[-1]], ranks)
    added, peak, seconds = table[:, :3].max(0).values.tolist()
    first, last = table[:, 3:].mean(0).tolist()
    return {
        "step": step.name,
        "added_mib": round(added, 1),
        "peak_mib": round(peak, 1),
        "ms": round(1000 * seconds, 1),
        "first_loss": first,
        "last_loss": last,
    }


def main(arguments: list[str]) -> int:
    settings = check(parse(LimitSettings, arguments))
    if len(settings.steps) != 1:
        raise UserError("measure.py measures one step: --steps=NAME; limits.py measures all")
    ranks = meet(settings)
    result = measure(settings, find(settings.steps[0]), ranks)
    if ranks.rank == 0:
        print(MARK + json.dumps(result), flush=True)
    destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "measure.py"))
