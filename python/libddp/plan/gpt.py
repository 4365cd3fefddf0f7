"""The GPT that `libddp plan --gpt` plans for: GPT-2's shape, tied embeddings, its loss.

model = Gpt.of_size("gpt2-medium", length=1024)
"""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn import functional

from libddp.errors import ArgumentError

#: layers, width, heads
SIZES = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
VOCABULARY = 50257


class Block(nn.Module):
    """Attention and MLP, each with its residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Returns the loss."""

    def __init__(
        self, layers: int, width: int, heads: int, *, length: int, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    @staticmethod
    def of_size(size: str, *, length: int, vocabulary: int = VOCABULARY) -> Gpt:
        """`size`: a name of SIZES, or LAYERSxWIDTH with heads of 64.

        Raises:
            ArgumentError: neither.
        """
        shape = SIZES.get(size)
        if found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size):
            layers, width = int(found[1]), int(found[2])
            heads = width // 64 if width % 64 == 0 else 1
            shape = (layers, width, heads)
        if shape is None:
            raise ArgumentError(
                f"--gpt {size!r} is no size of a GPT. Hint: LAYERSxWIDTH as in 12x768, or one of "
                f"{', '.join(SIZES)}."
            )
        return Gpt(*shape, length=length, vocabulary=vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
