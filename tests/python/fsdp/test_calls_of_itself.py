"""A sharded module that is called while it runs: `generate` that calls forward, recursion."""

import checks
import fsdp_models as models
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.blocks = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)])
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        for block in self.blocks:
            x = block(self.embedding(x)).tanh()
        return self.head(x)

    def generate(self, x, length=3):
        for _ in range(length):
            x = self(x)
        return self.head(x)  # still whole


class Tree(nn.Module):
    """The weights of a level are used after those of the levels under it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.inner, self.blocks = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x, depth):
        if depth:
            x = self(self.inner(x), depth - 1) + x
        return self.blocks[0](self.inner(x)).tanh()


class Careful(Writer):
    def forward(self, x, fails=False):
        if fails:
            raise LookupError("no such token")
        return super().forward(x)

    def generate(self, x):
        try:
            self(x, fails=True)
        except LookupError:
            return self.head(self(x))


def both(make, method=None):
    """The plain model, and the sharded ones with `method` made known."""
    for shard in (models.shard, models.shard_plain):
        sharded = shard(make())
        if method:
            models.libddp_fsdp().register_fsdp_forward_method(sharded, method)
        yield make(), sharded


def same_gradients(plain, sharded):
    """The same data on two ranks: the average is exact."""
    found = models.whole_gradients(sharded)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=0)


def check_generate_that_calls_forward():
    x = torch.linspace(-1, 1, 12).view(2, 6)
    for make in (Writer, Careful):
        for plain, sharded in both(make, "generate"):
            with torch.no_grad():
                assert sharded.generate(x).equal(plain.generate(x))
            for _ in range(2):
                for model in (plain, sharded):
                    model.zero_grad()
                    model.generate(x).pow(2).sum().backward()
                same_gradients(plain, sharded)
            assert sharded(x).equal(plain(x))


class Twice(nn.Module):
    """Parts of a unit's forward that run again in passes of their own, one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.blocks = nn.Linear(6, 6), nn.ModuleList([])

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x.tanh(), use_reentrant=True)


def check_reentrant_checkpoints_of_one_layer():
    x = torch.ones(2, 6, requires_grad=True)
    wanted = Twice()
    wanted(x).pow(2).mean().backward()
    for wrap in (models.wrap, models.shard, models.shard_plain):
        model = wrap(Twice(), **({"auto_wrap_policy": None} if wrap is models.wrap else {}))
        model(x).pow(2).mean().backward()
        found = models.whole_gradients(model)
        for name, parameter in wanted.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


def check_recursion():
    x = torch.linspace(-1, 1, 12).view(2, 6)
    for plain, sharded in both(Tree):
        with torch.no_grad():
            assert sharded(x, 3).equal(plain(x, 3))
        for model in (plain, sharded):
            model(x, 2).pow(2).sum().backward()
        same_gradients(plain, sharded)


results, test_on_all_ranks = checks.suite(globals(), 2)
