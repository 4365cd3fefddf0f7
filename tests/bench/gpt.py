"""A small GPT for the benchmarks of training steps: decoder blocks, tied embeddings.

model = Gpt(layers=6, width=256)
loss = model(torch.randint(128, (8, 64)))
"""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH = 128, 64


class Block(nn.Module):
    """Attention and MLP, each with its residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Returns the loss of predicting its own input."""

    def __init__(self, layers: int = 6, width: int = 256, heads: int = 8):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        # GPT-2's. With torch's 1.0 the tied head is certain of its answer from the start, the
        # gradients are denormal numbers, and some processors take 20 times as long for those.
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.blocks(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def block_of_steps(model, steps: int, batch: int, length: int = LENGTH, meet=lambda: None, **adamw):
    """A callable that trains for `steps` steps and waits for the other rank at their end."""
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **adamw)
    tokens = torch.randint(VOCABULARY, (batch, length))

    def run():
        for _ in range(steps):
            optimizer.zero_grad()
            model(tokens).backward()
            meet()
            optimizer.step()
        dist.barrier()

    return run


def seeded(*sizes):
    """A Gpt with the same values every time."""
    torch.manual_seed(0)
    return Gpt(*sizes)
