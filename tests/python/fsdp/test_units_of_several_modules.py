"""fully_shard([norm, head]): what torch's fully_shard gives on Gloo, also of losses in chunks."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Scores(torch.autograd.Function):
    """A fused head, which keeps the weight itself."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ hidden.flatten(0, -2)


class Net(nn.Module):
    def __init__(self, use="module"):
        super().__init__()
        self.use = use
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if self.use == "recomputed":
            return checkpoint(self.end, x, use_reentrant=False)
        x = self.norm(x)
        if self.use == "nothing":
            return x
        if self.use == "module":
            return self.head(x)
        scores = Scores.apply(x, self.head.weight)
        return scores + self.head(x) if self.use == "both" else scores

    def end(self, x):
        return self.head(self.norm(x))


def loss_in_chunks(model, hidden, targets):
    parts = zip(hidden.chunk(3, 1), targets.chunk(3, 1), strict=True)
    return sum(functional.cross_entropy(model.head(h).flatten(0, 1), t.flatten()) for h, t in parts)


def train(model):
    """Losses, and the weights afterwards."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(3):
        torch.manual_seed(2 * step + dist.get_rank())
        tokens = torch.randint(20, (2, 7))
        output, targets = model(tokens[:, :-1]), tokens[:, 1:]
        if model.use == "nothing":
            loss = loss_in_chunks(model, output, targets)
        else:
            loss = functional.cross_entropy(output.flatten(0, 1), targets.flatten())
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.full_tensor() for p in model.parameters())]


def check_training_is_torchs():
    for use in ("module", "weight", "both", "nothing", "recomputed"):
        found = []
        for fully_shard in (models.libddp_fsdp().fully_shard, models.theirs_of):
            model = models.build(lambda use=use: Net(use))
            for part in (*model.blocks, [model.norm, model.head]):
                fully_shard(part)
            found.append(train(fully_shard(model)))
        for own, other in zip(*found, strict=True):
            torch.testing.assert_close(own, other, msg=lambda text, use=use: f"{use}: {text}")


def check_a_forward_that_fails_between_them():
    model = models.build(lambda: Net("weight"))
    fsdp = models.libddp_fsdp()
    for part in (*model.blocks, [model.norm, model.head], model):
        fsdp.fully_shard(part)
    tokens = torch.arange(6).view(1, 6)
    wanted = model(tokens)
    model.use = "no such thing"
    hook = model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens)
    hook.remove()
    model.use = "weight"
    assert model.head.weight.full_tensor().shape == (20, 8)
    assert torch.equal(model(tokens), wanted)


results, test_on_two_ranks = checks.suite(globals(), 2)
