"""The fake device of tests/fakegpu for Python: an accelerator "fakegpu" and an NCCL that is none.

    import fakegpu

    fakegpu.load()                           # once per process, before the first tensor on it
    x = torch.ones(4, device="fakegpu")
    fakegpu.install_nccl()                   # libddp's groups reduce such tensors from now on
    ...
    assert fakegpu.races() == []

The library is the file that LIBDDP_FAKEGPU names (CMake's target libddp_fakegpu). It is linked to the
libddp.so of its own build and uses the one that `import libddp` has loaded, if that came first.
"""

from __future__ import annotations

import ctypes
import functools
import os
import types
from pathlib import Path

import torch

NAME = "fakegpu"


def missing() -> str | None:
    """Why the library cannot be loaded; None where it can."""
    path = os.environ.get("LIBDDP_FAKEGPU")
    if not path:
        return "LIBDDP_FAKEGPU names no libddp_fakegpu.so (CMake target libddp_fakegpu)"
    return None if Path(path).is_file() else f"LIBDDP_FAKEGPU={path} is no file"


@functools.cache
def load() -> ctypes.CDLL:
    """Registers the device, `torch.fakegpu` and the methods of tensors (`x.fakegpu()`)."""
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    import libddp  # noqa: F401  its libddp.so first: the library then uses that one

    path = os.environ["LIBDDP_FAKEGPU"]
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    library = ctypes.CDLL(path)
    for name in ("races", "issued", "wait_numbers"):
        getattr(library, f"fakegpu_{name}").restype = ctypes.c_char_p
    library.fakegpu_num_waits.restype = ctypes.c_int64
    return library


def races() -> list[str]:
    """What the race checker has found since the last call or reset."""
    return load().fakegpu_races().decode().splitlines()


def reset() -> None:
    """Of the race checker: accesses, races and numbers of waits."""
    load().fakegpu_reset()


def ignore_wait(k: int, device: int = -1) -> None:
    """Drops the k-th wait (from 1) for an event after the reset."""
    load().fakegpu_ignore_wait(ctypes.c_int64(k), device)


def num_waits(device: int = -1) -> int:
    """Waits for events since the reset."""
    return load().fakegpu_num_waits(device)


def redundant_waits(device: int) -> list[int]:
    """Numbers of waits that ordered nothing new."""
    return [int(number) for number in load().fakegpu_wait_numbers(device).split()]


def set_memory_limit(device: int, num_bytes: int) -> None:
    """Allocations beyond it raise torch.OutOfMemoryError; negative: no limit."""
    load().fakegpu_set_memory_limit(device, ctypes.c_int64(num_bytes))


def set_capturing(capturing: bool) -> None:
    """What streams answer that are asked whether a graph is captured."""
    load().fakegpu_set_capturing(int(capturing))


def _index(device) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _generator(device=None) -> torch.Generator:
    return torch._C._get_accelerator_generator(_index(device))


class _Stream(torch.Stream):
    """torch.cuda.Stream's way to make one: a device or nothing."""

    def __new__(cls, device=None, priority=0, **kwargs):
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)

    def __init__(self, *arguments, **kwargs):
        super().__init__()
