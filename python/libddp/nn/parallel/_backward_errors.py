"""What the other ranks hear of an exception in a backward pass.

C++ sees that a pass of the model broke off, but not why: autograd carries the exception past it to
the caller of backward(). All of torch's Python calls for a backward pass go through one object,
`torch.autograd.Variable._execution_engine`; ours is the same with one `except`.
"""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch.autograd import Variable

from libddp.distributed._exit import describe
from libddp.nn.parallel import _logging_data

_models = weakref.WeakSet()
#: Roots of sharded models.
_roots = weakref.WeakSet()


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which lets the models know of what it raises."""

    def run_backward(self, *args, **kwargs):
        try:
            return super().run_backward(*args, **kwargs)
        except BaseException as error:
            tell(error)
            raise


@cache
def _install() -> None:
    """Once; an engine that somebody else has put there stays, and C++ tells the others less."""
    if type(Variable._execution_engine) is torch._C._ImperativeEngine:
        Variable._execution_engine = _Engine()


def watch(model) -> None:
    """From now on the other ranks of `model` learn why one of its backward passes broke off."""
    _install()
    _models.add(model)


def watch_root(root) -> None:
    """The same for a sharded model, `root.model`."""
    _install()
    _roots.add(root)


def tell(error: BaseException) -> None:
    """To the ranks that may wait for gradients of this one."""
    for model in list(_models):
        replica = model.__dict__.get("_replica")
        if replica is not None and replica.backward_failed(describe(error)):
            _logging_data.note(model, error)
    for root in list(_roots):
        if root.model is not None:
            root.model.backward_failed(describe(error))
