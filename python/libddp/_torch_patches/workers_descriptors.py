"""Lets the workers of torch's launcher inherit a descriptor.

Replaces `Popen` in the module of torch.distributed.elastic that starts workers: the launcher has no
argument for descriptors, and a key in the environment or in a file could be read by others.
`libddp run` asks for it, in its own process, which starts workers and does nothing else; it stays
for good.
"""

from __future__ import annotations

import functools
import subprocess

from libddp._torch_patches.replacing import LAUNCHER


def put(descriptor: int) -> None:
    """The workers that are started from now on have it too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    LAUNCHER.put(
        subprocess_handler, "Popen", functools.partial(subprocess.Popen, pass_fds=(descriptor,))
    )
