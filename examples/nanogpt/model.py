"""A GPT: token and position embeddings, a stack of pre-norm transformer blocks, a tied output.

model = GPT(GPTConfig(vocab_size=97, block_size=128, n_layer=4, n_head=4, n_embd=128))
logits, loss = model(tokens, targets)      # [batch, time] of int64
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    bias: bool = False
    gelu: str = "none"  # or "tanh", the approximation that GPT-2 was trained with


class Attention(nn.Module):
    """Causal self-attention of `n_head` heads through torch's fused (flash) kernel."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.n_head, width // self.n_head)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        return F.dropout(self.out(mixed), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear maps, four times as wide in between."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.dropout, self.gelu = config.dropout, config.gelu
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.out = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.up(x), approximate=self.gelu)
        return F.dropout(self.out(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        self.head.weight = self.token.weight  # tied: one matrix reads and writes tokens
        self._num_params = sum(p.numel() for p in self.parameters()) - self.position.weight.numel()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Attention | FeedForward):
            # Each block adds two terms to the residual stream: keep its variance near one (GPT-2).
            module.out.weight.data.div_(math.sqrt(2 * self.config.n_layer))
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None):
        """Return (logits, loss). Without targets: logits of the last position only, loss None."""
        time = tokens.size(1)
        x = self.token(tokens) + self.position(torch.arange(time, device=tokens.device))
        x = F.dropout(x, self.config.dropout, self.training)
        x = self.norm(self.through_blocks(x))
        if targets is None:
            return self.head(x[:, -1:]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float]
    ) -> torch.optim.AdamW:
        """AdamW that decays matrices and embeddings, but neither gains nor biases."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    def num_params(self) -> int:
        """Weights that multiply: all but the position embedding, which is only looked up."""
        return self._num_params  # counted at first: sharding leaves a rank less of each

    def estimate_mfu(self, sequences: int, seconds: float, peak_flops: float) -> float:
        """Share of `peak_flops` used by forward and backward of `sequences` (PaLM, appendix B)."""
        attention = 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
        per_token = 6 * self.num_params() + attention
        return per_token * self.config.block_size * sequences / seconds / peak_flops

    @torch.no_grad()
    def generate(self, tokens, count: int, temperature: float, top_k: int, generator=None):
        """Append `count` tokens to `tokens` [batch, time], each drawn from the top_k likeliest."""
        for _ in range(count):
            logits, _ = self(tokens[:, -self.config.block_size :])
            best, index = torch.topk(logits[:, -1], min(top_k, self.config.vocab_size))
            chances = torch.softmax(best / temperature, dim=-1)
            pick = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat((tokens, index.gather(1, pick)), dim=1)
        return tokens
