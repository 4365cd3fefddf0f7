"""Modules that share a unit, or run apart from the model's forward, beside torch's FSDP2 on Gloo.

A loss in chunks calls the head itself, or computes with its weight.
"""

import copy
from itertools import product

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
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


def ours(part):
    return models.libddp_fsdp().fully_shard(part)


def one_unit(model):
    return [[model.norm, model.head]]


def apart(model):
    return [model.norm, model.head]


def of_the_root(model):
    return []


def check_training_is_torchs():
    uses = ("module", "weight", "both", "nothing", "recomputed")
    for use, parts in product(uses, (one_unit, apart, of_the_root)):
        if parts is apart and use in ("weight", "both"):
            continue  # the weight is a DTensor there
        found = []
        for fully_shard in (ours, models.theirs_of):
            model = models.build(lambda use=use: Net(use))
            for part in (*model.blocks, *parts(model)):
                fully_shard(part)
            found.append(train(fully_shard(model)))
        for own, other in zip(*found, strict=True):
            torch.testing.assert_close(own, other, msg=f"{use}, {parts.__name__}")


def check_gradients_of_chunks_are_torchs():
    """Many calls of the head in one pass: of the sum only the rounding of each matters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for parts in (one_unit, apart, of_the_root):
        found = []
        for fully_shard in (models.libddp_fsdp().fully_shard, models.theirs_of):
            model = models.build(lambda: Net("nothing"))
            for part in (*model.blocks, *parts(model)):
                fully_shard(part, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            torch.manual_seed(dist.get_rank())
            tokens = torch.randint(20, (4, 7))
            loss_in_chunks(model, model(tokens[:, :-1]), tokens[:, 1:]).float().backward()
            found.append(model.head.weight.grad.full_tensor())
        assert torch.equal(*found), parts.__name__


def check_a_forward_that_fails_between_them():
    model = models.build(lambda: Net("weight"))
    for part in (*model.blocks, [model.norm, model.head], model):
        ours(part)
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


def check_parts_of_the_root_between_forward_and_backward():
    model = models.build(lambda: Net("nothing"))
    for part in (*model.blocks, model):
        ours(part)
    tokens = torch.arange(6).view(1, 6)
    for _ in range(2):
        hidden = model(tokens)
        assert isinstance(model.head.weight, DTensor)  # what the optimizer has
        hook = model.head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.head(hidden)
        hook.remove()
        scores = model.head(hidden)
        with torch.no_grad():
            assert torch.equal(model.head(hidden), scores)
        scores.sum().backward()
    wanted = models.build(lambda: Net("module"))
    wanted(tokens).sum().backward()
    grad = model.head.weight.grad.full_tensor()
    torch.testing.assert_close(grad, 2 * wanted.head.weight.grad)
    assert "forward" in vars(model.head)
    again = copy.deepcopy(model.head)
    assert again.forward.__self__ is again
    model.eval()
    kept = model.head.register_forward_pre_hook(lambda module, _: seen.update(vars(module)))
    model.use, seen = "module", {}
    model(tokens)
    kept.remove()
    assert seen
    assert "forward" not in seen  # in the model's own forward


class Stage(nn.Module):
    """What a pipeline's last stage has; its loss calls the head."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.norm(torch.tanh(self.block(torch.tanh(self.first(x)))))


def check_passes_of_the_head_before_the_models():
    """The model's own pass still comes to all that its forward has used."""
    fully_shard = models.libddp_fsdp().fully_shard
    for shares, frozen, kind in product((True, False), ("", "norm", "first"), ("grad", "backward")):
        torch.manual_seed(3)
        plain = Stage()
        ours = copy.deepcopy(plain)
        for model in (plain, ours):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen or not name.startswith(frozen))
        fully_shard(ours.block, reshard_after_forward=False)
        if shares:
            fully_shard([ours.norm, ours.head], reshard_after_forward=False)
        fully_shard(ours)
        found = [gradient_behind_chunks(model, kind) for model in (plain, ours)]
        assert torch.equal(*found), (shares, frozen, kind)


def gradient_behind_chunks(model, kind):
    """Of the inputs of two forwards that wait, both beside passes of the head."""
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    waiting = [(x, model(x)) for x in inputs]
    for x, hidden in waiting:
        chunk = hidden.detach().requires_grad_()
        for _ in range(3):
            model.head(chunk).sum().backward()
        if kind == "grad":
            (x.grad,) = torch.autograd.grad(hidden, x, chunk.grad)
        else:
            hidden.backward(chunk.grad)
    return torch.stack([x.grad for x in inputs])


results, test_on_two_ranks = checks.suite(globals(), 2)
