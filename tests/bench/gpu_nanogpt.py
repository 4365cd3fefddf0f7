"""nanoGPT's loop on one GPU: tokens per second of GPT-2 124M, bare, under libddp's DDP, torch's.

    python tests/bench/gpu_nanogpt.py [--rounds 10] [--steps 4] [--batch 12] [--compile 0]

The whole iteration as nanoGPT has it: a batch from a memory-mapped file by way of pinned memory,
autocast to bf16, backward, clipping, fused AdamW. The data are random tokens.
"""

import tempfile
from pathlib import Path

import gpu
import numpy as np
import pairing
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class Data:
    """As nanoGPT's get_batch: windows of a memory-mapped file."""

    def __init__(self, folder: Path, device, options):
        rng = np.random.default_rng(1)
        path = folder / "train.bin"
        rng.integers(options.vocabulary, size=200 * options.length, dtype=np.uint16).tofile(path)
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.device, self.length, self.batch = device, options.length, options.batch

    def next(self):
        starts = torch.randint(len(self.tokens) - self.length - 1, (self.batch,)).tolist()
        rows = [self.tokens[s : s + self.length + 1].astype(np.int64) for s in starts]
        rows = torch.from_numpy(np.stack(rows))
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def block_of_steps(model, data: Data, steps: int):
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)

    def run():
        x, y = data.next()
        for _ in range(steps):
            with torch.autocast(data.device.type, torch.bfloat16):
                loss = model(x, y)[1]
            x, y = data.next()  # while the device computes
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        gpu.synchronize(data.device)

    return run


def main() -> None:
    parser = gpu.parser(__doc__, rounds=10, steps=4, batch=12, compile=0, **gpu.GPT2)
    options = parser.parse_args()
    device = gpu.begin(options)
    group = gpu.alone(device)
    from libddp.nn.parallel import DistributedDataParallel

    wraps = {
        "bare": lambda model: model,
        "libddp": DistributedDataParallel,
        "torch": lambda model: TorchDDP(model, process_group=group),
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Data(Path(folder), device, options)

        def block(wrap):
            model = gpu.gpt2(device, options)
            model = wrap(torch.compile(model) if options.compile else model)
            return block_of_steps(model, data, options.steps)

        lines = pairing.compare(
            {name: block(wrap) for name, wrap in wraps.items()},
            rounds=options.rounds,
            warmup=2,
            case=f"nanoGPT, batch {options.batch} x {options.length}",
        )
    for line in pairing.per(lines, options.steps):
        line["tokens_per_s"] = options.batch * options.length / line["median"]
    gpu.emit(lines)
    rates = {line["candidate"]: line["tokens_per_s"] for line in lines}
    bare, torchs = (rates["libddp"] / rates[name] for name in ("bare", "torch"))
    gpu.target("G9 nanoGPT tokens/s, libddp / bare loop", ">= 0.995", bare, met=bare >= 0.995)
    gpu.target("G9 nanoGPT tokens/s, libddp / torch DDP", ">= 1", torchs, met=torchs >= 1)


if __name__ == "__main__":
    main()
