"""A GPT built from torch's own modules, in the shape of minGPT.

model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128, vocab_size=97, block_size=128))
logits, loss = model(tokens, targets)      # [batch, time] of int64
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class GPTConfig:
    n_layer: int
    n_head: int
    n_embd: int
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    vocab_size: int = 0  # this one and the next follow from the text
    block_size: int = 0


class Block(nn.Module):
    """Attention, then a feed-forward net; each reads a normalised copy and adds what it found."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.n_embd
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(
            width, config.n_head, dropout=config.attn_pdrop, batch_first=True
        )
        self.attention_dropout = nn.Dropout(config.resid_pdrop)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(config.resid_pdrop),
        )
        # True = may not be seen. It follows from block_size, so snapshots do without it.
        future = torch.ones(config.block_size, config.block_size, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.before_attention(x)
        mask = self.future[: x.size(1), : x.size(1)]
        found, _ = self.attention(seen, seen, seen, attn_mask=mask, need_weights=False)
        x = x + self.attention_dropout(found)
        return x + self.feed_forward(x)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Parameter(torch.zeros(config.block_size, config.n_embd))
        self.dropout = nn.Dropout(config.embd_pdrop)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Normal with deviation 0.02; what adds to the residual stream starts smaller (GPT-2)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2 and name != "places":
                adds = name.endswith(("out_proj.weight", "feed_forward.3.weight"))
                shrink = (2 * self.config.n_layer) ** 0.5 if adds else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None):
        """Return (logits [batch, time, vocab_size], mean loss or, without targets, None)."""
        x = self.dropout(self.characters(tokens) + self.places[: tokens.size(1)])
        logits = self.head(self.norm(self.blocks(x)))
        if targets is None:
            return logits, None
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return logits, loss

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """For an optimizer: the matrices of linear maps decay, nothing else does."""
        decayed = [
            parameter
            for name, parameter in self.named_parameters()
            if parameter.dim() >= 2 and name not in ("places", "characters.weight")
        ]
        chosen = set(map(id, decayed))
        others = [parameter for parameter in self.parameters() if id(parameter) not in chosen]
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
