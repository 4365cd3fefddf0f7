"""A function as a block in each form that is one node of the graph, libddp's and torch's.

call(function, *args)    # of FORMS, or torchs
"""

import torch
from libddp.utils.checkpoint import checkpoint, checkpoint_module
from torch.utils.checkpoint import CheckpointFunction


class Module(torch.nn.Module):
    """One that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


def by_module(function, *args):
    return checkpoint_module(Module(function), *args)


def torchs(function, *args):
    return CheckpointFunction.apply(function, True, *args)


#: libddp's.
FORMS = (reentrant, by_module)
