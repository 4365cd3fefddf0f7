"""Lets the workers of torch's launcher inherit descriptors, or start in another way.

Replaces `Popen` in the module of torch.distributed.elastic that starts workers: the launcher has no
argument for descriptors, a key in the environment or in a file could be read by others, and only
a pipe tells a worker that its launcher died. With --preload the workers are forked instead
(_preload.py), and everything else of the launcher stays. `libddp run` asks for it, in its own
process, which starts workers and does nothing else; it stays for good.
"""

from __future__ import annotations

import functools
import subprocess

from libddp._torch_patches.replacing import LAUNCHER

_descriptors: list[int] = []


def put(descriptor: int) -> None:
    """The workers that are started from now on have it too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    _descriptors.append(descriptor)
    start = functools.partial(subprocess.Popen, pass_fds=tuple(_descriptors))
    LAUNCHER.put(subprocess_handler, "Popen", start)


def start_with(start) -> None:
    """The workers are started by a function with Popen's arguments, which hands them on."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    LAUNCHER.put(subprocess_handler, "Popen", start)


def handed_on() -> tuple[int, ...]:
    """What workers inherit."""
    return tuple(_descriptors)
