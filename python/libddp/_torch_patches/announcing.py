"""Says that a model is torch's, where a script expects libddp's.

Replaces `__init__` of torch's DistributedDataParallel, FullyShardedDataParallel and FSDPState: a
name that was imported before the drop-in keeps its meaning, which shows only when a model is made.
The drop-in asks for it (ddp, fsdp); undone by uninstall.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from functools import cache, wraps

from libddp._torch_patches.replacing import Replacements


def put(
    kind: type, text: str, replacements: Replacements, keep_torchs: Collection[str] = ()
) -> None:
    """Making an object of this class warns with `text`, once in a process.

    Args:
        keep_torchs: names of modules that make torch's on purpose.
    """
    construct = kind.__init__

    @wraps(construct)
    def announce_and_construct(self, *args, **kwargs):
        if sys._getframe(1).f_globals.get("__name__") not in keep_torchs:
            _say(text)
        construct(self, *args, **kwargs)

    replacements.put(kind, "__init__", announce_and_construct)


@cache
def _say(text: str) -> None:
    """A warning, once in a process, and on one rank where the launcher tells ranks apart."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=3)
