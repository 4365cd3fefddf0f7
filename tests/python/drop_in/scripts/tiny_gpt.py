"""A GPT of two blocks over 32 characters; with a mask buffer as in minGPT, or without."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH = 32, 16, 32


class Block(nn.Module):
    def __init__(self, buffered):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        if buffered:
            self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool())

    def forward(self, x):
        parts = self.attend(self.ln_1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = getattr(self, "mask", None)
        mixed = functional.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=mask is None
        )
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Returns (logits, loss); the head shares the embedding's weight."""

    def __init__(self, buffered=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(buffered) for _ in range(2)))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight
        self.apply(self.initialize)

    @staticmethod
    def initialize(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, learning_rate):
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        plain = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def text(length=4096):
    """Characters with something to learn: each follows from the one before, mostly."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(0, VOCABULARY, (length,), generator=generator)
    steps = torch.where(noise < 6, noise, torch.ones_like(noise))
    return steps.cumsum(0) % VOCABULARY
