"""Makes autograd's engine tell the models what a backward pass raised.

Replaces `torch.autograd.Variable._execution_engine`, through which all of torch's Python calls for
a backward pass go, by the same engine with one `except`. Nothing less sees every exception: one
that is raised before the pass has reached the model (in the loss) passes no hook of the model's on
its way to the caller of backward(). Without it the other ranks learn what nobody catches
(libddp.distributed._exit) and, from C++, what breaks off a pass through the model; with it also
what a script catches before, and where in the program it was. The drop-in asks for it; undone by
uninstall.
"""

from __future__ import annotations

import torch
from torch.autograd import Variable

from libddp._torch_patches.ddp import logging_data
from libddp._torch_patches.replacing import Replacements
from libddp.nn.parallel import _backward_errors


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which lets the models know of what it raises."""

    def run_backward(self, *args, **kwargs):
        try:
            return super().run_backward(*args, **kwargs)
        except BaseException as error:
            for model in _backward_errors.tell(error):
                logging_data.note(model, error)
            raise


def put(replacements: Replacements) -> None:
    """For models that exist too. An engine that somebody else has put there stays."""
    if type(Variable._execution_engine) is torch._C._ImperativeEngine:
        replacements.put(Variable, "_execution_engine", _Engine())
