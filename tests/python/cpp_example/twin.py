"""The programs of examples/cpp in Python: the same model, batches and losses.

    losses = ranks.run(twin.train, 2, path, 20, "sgd", 0.1)[0]   # what rank 0 of ddp would print
    losses = ranks.run(twin.train_sharded, 2, path, 20, "sgd", 0.1)[0]   # of fsdp

Modules are assigned in the order in which transformer.cpp registers them, so that both draw the
same numbers from torch's generator.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

SEED = 1
ROWS = 8
CONTEXT = 32
WIDTH = 64
HEADS = 4
LAYERS = 2


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x: float32 [rows, length, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, HEADS, -1).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.attention_norm(x))
        return x + self.contract(functional.gelu(self.expand(self.mlp_norm(x))))


class Transformer(nn.Module):
    """int64 tokens [rows, length] to logits [rows, length, vocabulary]."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.token_embedding.weight)


def mix(x: int) -> int:
    """SplitMix64's mixing step, on 64 bits."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def read_text(path: str) -> tuple[torch.Tensor, int]:
    """A file as int64 tokens, one for each byte, and the number of different bytes."""
    text = Path(path).read_bytes()
    token = {byte: place for place, byte in enumerate(sorted(set(text)))}
    return torch.tensor([token[byte] for byte in text]), len(token)


def batch(text: torch.Tensor, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, int64 [ROWS, CONTEXT] each."""
    key = mix(mix(mix(SEED) ^ step) ^ rank)
    starts = [mix(key ^ row) % (len(text) - CONTEXT) for row in range(ROWS)]
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_optimizer(name: str, model, lr: float) -> torch.optim.Optimizer:
    """SGD in Python's one-tensor-at-a-time form: the one that the C++ frontend has."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9, foreach=False, fused=False)
    from libddp.optim import AdamW

    shared = {"shard_over": model} if name == "zero1" else {}
    return AdamW(model.parameters(), lr, weight_decay=0.01, **shared)


def train(
    path: str, steps: int, optimizer_name: str, lr: float, folder: str | None = None
) -> list[tuple[float, float]]:
    """On a rank: this rank's loss and the average over the ranks, for each step.

    Args:
        folder: goes on from the newest snapshot in it, and leaves one at its end.
    """
    from libddp.nn.parallel import DistributedDataParallel

    wrap = DistributedDataParallel
    return _train(wrap, lambda model: None, path, steps, optimizer_name, lr, folder)


def train_sharded(
    path: str, steps: int, optimizer_name: str, lr: float, folder: str | None = None
) -> list[tuple[float, float]]:
    """The same with sharded parameters and clipped gradients."""
    from libddp.distributed.fsdp import FullyShardedDataParallel
    from libddp.distributed.fsdp.wrap import ModuleWrapPolicy

    def wrap(model):
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))

    def clip(model):
        model.clip_grad_norm_(1.0)

    return _train(wrap, clip, path, steps, optimizer_name, lr, folder)


def _train(wrap, before_step, path, steps, optimizer_name, lr, folder) -> list[tuple[float, float]]:
    import libddp.distributed as dist

    import libddp

    torch.set_num_threads(1)
    dist.init_process_group()
    torch.manual_seed(SEED)
    text, vocabulary = read_text(path)
    model = wrap(Transformer(vocabulary))
    optimizer = make_optimizer(optimizer_name, model, lr)
    losses, first = [], 0
    if folder:
        snapshot = libddp.Snapshot(folder)
        first = snapshot.load(model, optimizer).get("step", 0)
    for step in range(first, steps):
        optimizer.zero_grad()
        tokens, targets = batch(text, step, dist.get_rank())
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        before_step(model)
        optimizer.step()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append((loss.item(), average.item()))
    if folder:
        snapshot.save(steps, model, optimizer, extra={"step": steps}, storage=True)
        snapshot.close()
    dist.destroy_process_group()
    return losses
