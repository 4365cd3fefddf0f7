"""One training step of a small GPT on two ranks: no synchronisation, a bare meeting, libddp, torch
over Gloo and over libddp, libddp over Gloo, and libddp with LIBDDP_NAN_CHECK=raise.

    python tests/bench/ddp_step.py [rounds] [steps per block]

Six layers of width 256 (about 5 M parameters), batch 8 x 64, AdamW, one thread per rank. They take
turns in blocks inside one pair of processes; a block ends with a barrier, so its time is that
of the slower rank. "meeting" exchanges nothing and only waits for the other rank in every step: the
floor under any synchronous training, as each step then takes as long as its slower rank. One JSON
line per candidate, times per step; `overhead_ms` is the step's time above the one without
synchronisation, by min and by median.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import pairing
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 6, 256, 8, 128, 8, 64


class Block(nn.Module):
    """Attention and MLP, each with its residual."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.blocks(self.tokens(tokens) + self.positions)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def block_of_steps(wrap, steps: int, meet=lambda: None):
    """A callable that trains for `steps` steps and waits for the other rank at their end."""
    torch.manual_seed(0)
    model = wrap(Gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))

    def run():
        for _ in range(steps):
            optimizer.zero_grad()
            model(tokens).backward()
            meet()
            optimizer.step()
        dist.barrier()

    return run


def measure(rounds: int, steps: int) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import barrier, from_c10d, init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("libddp")
    gloo = dist.new_group(backend="gloo")
    torch.set_num_threads(1)

    def torch_ddp(group):
        return lambda model: nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )

    def libddp_over_gloo(model):
        group = from_c10d(dist.new_group(backend="gloo"))
        return DistributedDataParallel(model, process_group=group)

    def checking(model):
        os.environ["LIBDDP_NAN_CHECK"] = "raise"  # read where a model is wrapped
        try:
            return DistributedDataParallel(model)
        finally:
            del os.environ["LIBDDP_NAN_CHECK"]

    candidates = {
        "no sync": block_of_steps(lambda model: model, steps),
        "meeting": block_of_steps(lambda model: model, steps, meet=barrier),
        "libddp": block_of_steps(DistributedDataParallel, steps),
        "libddp, gradients checked": block_of_steps(checking, steps),
        "torch": block_of_steps(torch_ddp(gloo), steps),
        "torch on libddp": block_of_steps(torch_ddp(None), steps),
        "libddp over gloo": block_of_steps(libddp_over_gloo, steps),
    }
    lines = pairing.compare(candidates, rounds=rounds, warmup=2, case="gpt step, 2 ranks")
    dist.destroy_process_group()
    return lines


def keep_freed_memory() -> None:
    """glibc gives freed gradients back to the kernel now and then; the page faults that follow cost
    some steps of any candidate 10 ms and drown what is measured. For the ranks, not this process.
    """
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))  # glibc's largest


def main() -> None:
    keep_freed_memory()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    lines = ranks.run(measure, 2, rounds, steps, deadline=550)[0]
    for line in lines:
        for key in ("min", "median", "cpu_min_s", "cpu_s"):
            line[key] /= steps
        for key in ("min", "median"):
            line[f"overhead_{key}_ms"] = (line[key] - lines[0][key]) * 1e3
        pairing.emit(line)


if __name__ == "__main__":
    main()
