"""What the DDP wrapper costs on one rank: GPT-2 124M under autocast to bf16, forward and backward.

    python tests/bench/gpu_ddp.py [--rounds 16] [--steps 4] [--batch 8]

The bare model, libddp's wrapper, torch's (bucket views) over its own NCCL and over libddp's group
take turns. One JSON line per candidate, times per step, with the kernels and copies of one step;
`over_bare` is the step's time above the bare one's in percent, by min and by median.
"""

import gpu
import pairing
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def step_of(model, x, y):
    def step():
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = model(x, y)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def candidates(device, options, group) -> dict:
    from libddp.nn.parallel import DistributedDataParallel

    wraps = {
        "bare": lambda model: model,
        "libddp": DistributedDataParallel,
        "torch": lambda m: TorchDDP(m, process_group=group, gradient_as_bucket_view=True),
        "torch on libddp": lambda m: TorchDDP(m, gradient_as_bucket_view=True),
    }
    batch = gpu.tokens(device, options)
    models = {name: wrap(gpu.gpt2(device, options)) for name, wrap in wraps.items()}
    return {name: (model, step_of(model, *batch)) for name, model in models.items()}


def measure(device, options, group) -> tuple[list[dict], int]:
    """Lines, and the number of libddp's buckets."""
    found = candidates(device, options, group)

    lines = pairing.compare(
        {name: gpu.block(step, options.steps, device) for name, (_, step) in found.items()},
        rounds=options.rounds,
        warmup=3,  # buckets have their final shape after the first step
        case=f"GPT-2, {options.layers} x {options.width}, batch {options.batch} x {options.length}",
    )
    for line in pairing.per(lines, options.steps):
        seen = gpu.activity(found[line["candidate"]][1], device, line["candidate"])
        line |= {"kernels": seen.kernels, "copies": seen.copies, "busy_ms": seen.busy_ms}
        for key in ("min", "median"):
            line[f"over_bare_{key}"] = (line[key] / lines[0][key] - 1) * 100
    return lines, len(found["libddp"][0].explain().buckets)


def main() -> None:
    options = gpu.parser(__doc__, rounds=16, steps=4, batch=8, **gpu.GPT2).parse_args()
    device = gpu.begin(options)
    lines, buckets = measure(device, options, gpu.alone(device))
    gpu.emit(lines, buckets=buckets)
    rows = gpu.by_name(lines)
    over = rows["libddp"]["over_bare_median"]
    gpu.target("G1 DDP wrapper above the bare step, %", "<= 0.5", over, met=over <= 0.5)
    added = (rows["libddp"]["kernels"] - rows["bare"]["kernels"]) / buckets
    gpu.target("G1 kernels added per bucket", "<= 1", added, met=added <= 1)


if __name__ == "__main__":
    main()
