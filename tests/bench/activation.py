"""What a checkpointed block costs beyond running it twice: 12 small blocks, one thread.

    python tests/bench/activation.py [rounds]

No checkpointing, the block run twice in the forward pass (the extra forward pass, with nothing
else), libddp's and torch's forms take turns in one process. One JSON line per candidate;
`us_per_block` is the CPU time of a step beyond "forward twice", per block (difference of the
minima; `us_per_block_median` of the medians). Blocks are tiny, so that calls count, not arithmetic.
"""

import functools
import sys

import pairing
import torch
import torch.utils.checkpoint as torchs
from torch import nn
from torch.nn import functional as F

BLOCKS = 12
WIDTH = 16


class Block(nn.Module):
    """12 operators, dropout among them."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix1, self.mix2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + F.dropout(self.mix2(torch.tanh(self.mix1(self.norm1(x)))), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


def step(blocks, call):
    x = torch.randn(2, 8, WIDTH, requires_grad=True)

    def run():
        y = x
        for block in blocks:
            y = call(block, y)
        y.sum().backward()

    return run


def candidates() -> dict:
    from libddp.utils import checkpoint as ours

    torch.manual_seed(0)
    blocks = [Block() for _ in range(BLOCKS)]
    products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]

    def by(checkpoint, **settings):
        return step(blocks, functools.partial(checkpoint, **settings))

    def selective(theirs):
        contexts = functools.partial(theirs.create_selective_checkpoint_contexts, products)
        return by(theirs.checkpoint, use_reentrant=False, context_fn=contexts)

    return {
        "forward twice": step(blocks, lambda block, x: (block(x), block(x))[1]),
        "none": step(blocks, lambda block, x: block(x)),
        "libddp": by(ours.checkpoint, use_reentrant=False),
        "libddp early_stop=None": by(ours.checkpoint, use_reentrant=False, early_stop=None),
        "libddp reentrant": by(ours.checkpoint, use_reentrant=True),
        "libddp module": by(ours.checkpoint_module),
        "libddp selective": selective(ours),
        "torch": by(torchs.checkpoint, use_reentrant=False),
        "torch reentrant": by(torchs.checkpoint, use_reentrant=True),
        "torch selective": selective(torchs),
    }


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    lines = pairing.compare(candidates(), rounds=rounds, repeat=2, warmup=3, case="activation")
    for line in lines:
        line["us_per_block"] = (line["cpu_min_s"] - lines[0]["cpu_min_s"]) / BLOCKS * 1e6
        line["us_per_block_median"] = (line["cpu_s"] - lines[0]["cpu_s"]) / BLOCKS * 1e6
        pairing.emit(line)


if __name__ == "__main__":
    main()
