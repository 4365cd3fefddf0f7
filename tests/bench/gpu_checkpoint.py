"""Activation checkpointing on the GPU: a step of GPT-2 124M with every block recomputed.

    python tests/bench/gpu_checkpoint.py [--rounds 12] [--steps 3] [--batch 24]

The bound: a step without recomputation, and the blocks' forward once more. `of_bound` is a step
over that; below 1 where a block's end need not be run again. One JSON line per candidate, with the
peak memory of a step. The batch is large enough that the device, not the host, sets the time.
"""

import functools

import gpu
import pairing
import torch
import torch.utils.checkpoint as torchs


def step_of(model, x, y, call=None):
    """With `call(block, x)` in the place of each block."""
    blocks = list(model.blocks)

    def through(h):
        for block in blocks:
            h = call(block, h)
        return h

    def step():
        if call:
            model.through_blocks = through
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = model(x, y)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)
        model.__dict__.pop("through_blocks", None)

    return step


def forward_of(model, x):
    """The blocks' forward without a graph, and what comes before them."""

    @torch.no_grad()
    def forward():
        with torch.autocast(x.device.type, torch.bfloat16):
            h = model.token(x) + model.position(torch.arange(x.shape[1], device=x.device))
            model.through_blocks(h)

    return forward


def candidates(device, options) -> dict:
    from libddp.utils import checkpoint as ours

    model, (x, y) = gpu.gpt2(device, options), gpu.tokens(device, options)
    products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]

    def by(package, **settings):
        return step_of(
            model, x, y, functools.partial(package.checkpoint, use_reentrant=False, **settings)
        )

    def selective(package):
        contexts = functools.partial(package.create_selective_checkpoint_contexts, products)
        return by(package, context_fn=contexts)

    return {
        "no recomputation": step_of(model, x, y),
        "forward of the blocks": forward_of(model, x),
        "libddp": by(ours),
        "libddp module": step_of(model, x, y, ours.checkpoint_module),
        "torch": by(torchs),
        "libddp selective": selective(ours),
        "torch selective": selective(torchs),
    }


def peak_of(step, device) -> float:
    """MiB beyond what is there before it."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    begin = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - begin) / 2**20


def main() -> None:
    options = gpu.parser(__doc__, rounds=12, steps=3, batch=24, **gpu.GPT2).parse_args()
    device = gpu.begin(options)
    steps = candidates(device, options)

    lines = pairing.compare(
        {name: gpu.block(step, options.steps, device) for name, step in steps.items()},
        rounds=options.rounds,
        case=f"checkpointed GPT-2, batch {options.batch} x {options.length}",
    )
    pairing.per(lines, options.steps)
    bound = {key: lines[0][key] + lines[1][key] for key in ("min", "median")}
    for line in lines:
        line["of_bound_min"] = line["min"] / bound["min"]
        line["of_bound"] = line["median"] / bound["median"]
        line["peak_MiB"] = peak_of(steps[line["candidate"]], device)
    gpu.emit(lines)
    rows = gpu.by_name(lines)
    for name in ("libddp", "libddp module"):
        of = rows[name]["of_bound"]
        gpu.target(f"G7 {name}: checkpointed step / bound", "<= 1.02", of, met=of <= 1.02)


if __name__ == "__main__":
    main()
