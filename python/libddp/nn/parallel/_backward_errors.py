"""The models whose other ranks hear of an exception in a backward pass, once somebody sees it.

C++ tells them of one that breaks off a pass which has reached the model. One before that, in the
loss, it does not see: autograd carries it to the caller of backward(). Whoever stands there calls
`tell`: with the drop-in that is autograd's engine (libddp._torch_patches.backward_engine).
"""

from __future__ import annotations

import weakref

from libddp.distributed._exit import describe

_models = weakref.WeakSet()
#: Roots of sharded models.
_roots = weakref.WeakSet()


def watch(model) -> None:
    """`tell` tells the other ranks of `model` why one of its backward passes broke off."""
    _models.add(model)


def watch_root(root) -> None:
    """The same for a sharded model, `root.model`."""
    _roots.add(root)


def tell(error: BaseException) -> list:
    """To the ranks that may wait for gradients of this one.

    Returns:
        The DistributedDataParallel models whose pass it was, as far as is known.
    """
    what = describe(error)
    failed = []
    for model in list(_models):
        replica = model.__dict__.get("_replica")
        if replica is not None and replica.backward_failed(what):
            failed.append(model)
    for root in list(_roots):
        if root.model is not None:
            root.model.backward_failed(what)
    return failed
