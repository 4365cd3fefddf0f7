"""A weight that is used while its unit does not run: rows in its place would give numbers."""

import sys

import checks
import fsdp_models as models
import pytest
import torch
from libddp.errors import ArgumentError
from torch import nn
from torch.nn import functional

USES = {
    "a matrix product": lambda h, head: h @ head.weight.t(),
    "the layer's function": lambda h, head: functional.linear(h, head.weight),
    "a vector": lambda h, head: h * head.scale,
    "a product that a vector would fit into": lambda h, head: h @ head.other,
}


class Head(nn.Module):
    """On two ranks the rows of `weight` and of `other` have as many elements as rows of `h`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.other = nn.Parameter(torch.randn(6, 2))

    def forward(self, h):
        return functional.linear(h, self.weight) + (h * self.scale) @ self.other


class Model(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.body, self.head, self.use = nn.Linear(4, 6), Head(), use

    def forward(self, x):
        h = self.body(x)
        return self.head(h) if self.use is None else self.use(h, self.head)


def faces():
    package = models.libddp_fsdp()
    return (
        package.FullyShardedDataParallel,
        lambda module: package.fully_shard(module, use_dtensor=False),
    )


def shard(face, use):
    torch.manual_seed(0)
    model = Model(use)
    model.head = face(model.head)
    return face(model), model


def check_it_fails():
    for face in faces():
        for name, use in USES.items():
            model, inner = shard(face, use)
            before = [(p.shape, p.data_ptr()) for p in model.parameters()]
            for with_gradients in (False, True):
                with (
                    torch.set_grad_enabled(with_gradients),
                    pytest.raises(RuntimeError) as caught,
                ):
                    model(torch.ones(3, 4))
                if sys.version_info >= (3, 11):
                    notes = " ".join(caught.value.__notes__)
                    assert "Hint: use it in its module's forward" in notes, name
                    assert "head" in notes or "Head" in notes
                assert [(p.shape, p.data_ptr()) for p in model.parameters()] == before
            inner.use = None  # and the model goes on
            model(torch.ones(3, 4)).sum().backward()
            assert all(p.grad is not None for p in model.parameters())


def check_what_runs_around_it_may_use_it():
    """A unit inside of another one, which is whole for both."""
    for face in faces():
        torch.manual_seed(0)
        wanted = Model(USES["a matrix product"])
        model = Model(USES["a matrix product"])
        model.load_state_dict(wanted.state_dict())
        model.body = face(model.body)
        outer = face(model)
        torch.testing.assert_close(outer(torch.ones(3, 4)), wanted(torch.ones(3, 4)))


def check_other_errors_have_no_note():
    def use(h, head):
        raise ValueError("no such token")

    for face in faces():
        model, _ = shard(face, use)
        with pytest.raises(ValueError, match="no such token") as caught:
            model(torch.ones(3, 4))
        assert not getattr(caught.value, "__notes__", None)


def check_forwards_that_compute_gradients():
    """What a pass inside of a forward leaves is hidden again."""
    seen = []

    def use(h, head):
        own = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(head(own).sum(), own)
        seen.append([tuple(p.shape) for p in head.parameters()])
        return h * gradient

    for face in faces():
        model, _ = shard(face, use)
        model(torch.ones(3, 4)).sum().backward()
        assert seen.pop() == [(6, 1, 1), (3,), (6, 1, 1)]


def check_writes_are_refused():
    """As under way: on one host other ranks read the rows, at their own time."""

    def moves(write):
        def use(h, head):
            with torch.no_grad():
                write(head.weight)
            return head(h)

        return use

    for face in faces():
        for write in (lambda w: w.mul_(0.5), lambda w: w.data.mul_(0.5)):
            model, inner = shard(face, moves(write))
            with pytest.raises(ArgumentError, match=r"'weight' while its unit did not run"):
                model(torch.ones(3, 4))
            inner.use = None
            model(torch.ones(3, 4)).sum().backward()


results, test_on_two_ranks = checks.suite(globals(), 2)
