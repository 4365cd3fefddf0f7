"""The fake device of tests/fakegpu for Python: an accelerator "fakegpu", and the checker of races.

    import fakegpu

    fakegpu.load()                           # once per process, before the first tensor on it
    x = torch.ones(4, device="fakegpu")
    ...
    assert fakegpu.races() == []

The library is the file that LIBDDP_FAKEGPU names (CMake's target libddp_fakegpu). It uses the
libddp.so that `import libddp` has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

NAME = "fakegpu"
NUM_DEVICES = 4
#: Functions whose result is no int.
_RESULTS = {
    "fakegpu_races": ctypes.c_char_p,
    "fakegpu_num_waits": ctypes.c_int64,
    "fakegpu_num_operations": ctypes.c_int64,
    "fakegpu_num_host_waits": ctypes.c_int64,
    "fakegpu_redundant_waits": ctypes.c_char_p,
    "fakegpu_hold": ctypes.c_void_p,
    "mock_nccl_issued": ctypes.c_char_p,
    "mock_nccl_live": ctypes.c_char_p,
}


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
    import libddp  # noqa: F401  first, so that the library uses the same libddp.so

    path = os.environ["LIBDDP_FAKEGPU"]
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    _let_libddp_move_it()
    library = ctypes.CDLL(path)
    for name, result in _RESULTS.items():
        getattr(library, name).restype = result
    return library


def _let_libddp_move_it() -> None:
    """torch asks a backend's registration for which devices it is."""
    import libddp.distributed  # noqa: F401  registers it
    from torch.distributed import Backend

    Backend.backend_capability["libddp"] = [*Backend.backend_capability["libddp"], NAME]


def races() -> list[str]:
    """What the checker has found since the last call or reset."""
    return load().fakegpu_races().decode().splitlines()


def reset() -> None:
    """Of the checker: accesses, races and numbers of waits."""
    load().fakegpu_reset()


def ignore_wait(k: int, device: int = -1) -> None:
    """Drops the k-th wait (from 1) for an event after the reset."""
    load().fakegpu_ignore_wait(ctypes.c_int64(k), device)


def ignore_host_wait(k: int, device: int) -> None:
    """The checker does not know of the k-th (from 1) of num_host_waits."""
    load().fakegpu_ignore_host_wait(ctypes.c_int64(k), device)


def num_waits(device: int = -1) -> int:
    """Waits for events since the reset."""
    return load().fakegpu_num_waits(device)


def num_operations(device: int = 0) -> int:
    """Operations launched on a device since the reset."""
    return load().fakegpu_num_operations(device)


def num_host_waits(device: int = 0) -> int:
    """How often the host has blocked for a device since the reset."""
    return load().fakegpu_num_host_waits(device)


def redundant_waits(device: int) -> list[int]:
    """Numbers of a device's waits that ordered nothing new."""
    return [int(number) for number in load().fakegpu_redundant_waits(device).split()]


def set_memory_limit(device: int, num_bytes: int) -> None:
    """Allocations beyond it raise torch.OutOfMemoryError; negative: no limit."""
    load().fakegpu_set_memory_limit(device, ctypes.c_int64(num_bytes))


def set_capturing(capturing: bool) -> None:
    """What streams answer that are asked whether a graph is captured."""
    load().fakegpu_set_capturing(int(capturing))


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Holds up what is enqueued on a stream."""
    hold = load().fakegpu_hold(stream.device_index, ctypes.c_int64(stream.stream_id))
    try:
        yield
    finally:
        load().fakegpu_release(ctypes.c_void_p(hold))


def _index(device) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None or index < 0 else index


def _device(device) -> torch.device:
    return torch.device(NAME, _index(device))


def get_rng_state(device=NAME) -> torch.Tensor:
    """16 bytes: seed and offset, as CUDA's."""
    state = (ctypes.c_uint64 * 2)()
    load().fakegpu_get_generator(_index(device), state)
    return torch.tensor(list(bytes(state)), dtype=torch.uint8, device="cpu")


def set_rng_state(state: torch.Tensor, device=NAME) -> None:
    """What get_rng_state gave."""
    numbers = (ctypes.c_uint64 * 2).from_buffer_copy(bytes(state.tolist()))
    load().fakegpu_set_generator(_index(device), *map(ctypes.c_uint64, numbers))


def _manual_seed(seed: int, device=None) -> None:
    load().fakegpu_set_generator(_index(device), ctypes.c_uint64(seed), ctypes.c_uint64(0))


def _manual_seed_all(seed: int) -> None:
    for index in range(NUM_DEVICES):
        _manual_seed(seed, index)


class _DeviceGuard:
    """As torch.cuda.device: makes a device current."""

    def __init__(self, device) -> None:
        self._index = -1 if device is None else _index(device)
        self._before = -1

    def __enter__(self) -> None:
        if self._index >= 0:
            self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *_exception) -> None:
        if self._before >= 0:
            torch._C._accelerator_exchangeDevice(self._before)


@contextmanager
def _stream_guard(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _new_stream(device=None, priority: int = 0, **numbers) -> torch.Stream:
    if numbers:
        return torch.Stream(**numbers)
    return torch.Stream(_device(device), priority=priority)


def _new_event(enable_timing: bool = False, **_flags) -> torch.Event:
    return torch.Event(device=NAME, enable_timing=enable_timing)


def _current_stream(device=None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def _default_stream(device=None) -> torch.Stream:
    current = _current_stream(device)
    return torch.Stream(
        stream_id=0, device_index=current.device_index, device_type=current.device_type
    )


def _wrapped(name: str):
    """A function of torch.accelerator.memory under its CUDA name."""

    def function(device=None):
        return getattr(torch.accelerator.memory, name)(_device(device))

    return function


def _device_module() -> types.ModuleType:
    """torch.fakegpu, as far as torch asks a device's module for something."""
    module = types.ModuleType(f"torch.{NAME}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "_exchange_device": torch._C._accelerator_exchangeDevice,
        "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_device(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(i) for i in range(NUM_DEVICES)],
        "set_rng_state_all": lambda all: [set_rng_state(s, i) for i, s in enumerate(all)],
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed_all,
        "initial_seed": lambda: int.from_bytes(bytes(get_rng_state().tolist()[:8]), "little"),
        "device": _DeviceGuard,
        "stream": _stream_guard,
        "Stream": _new_stream,
        "Event": _new_event,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "set_stream": torch.accelerator.set_stream,
        "empty_cache": torch.accelerator.memory.empty_cache,
        "memory_allocated": _wrapped("memory_allocated"),
        "max_memory_allocated": _wrapped("max_memory_allocated"),
        "reset_peak_memory_stats": _wrapped("reset_peak_memory_stats"),
        "get_device_name": lambda device=None: "fakegpu",
        "get_device_capability": lambda device=None: (9, 0),
    }
    module._initialized = True  # torch.utils.checkpoint asks before it looks at random states
    for name, function in functions.items():
        setattr(module, name, function)
    return module
