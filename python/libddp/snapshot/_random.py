"""The states of the random number generators of this process, so that repeated steps draw the same
numbers: Python's, numpy's where it is loaded, torch's of the CPU and of each device in use.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def state() -> dict[str, Any]:
    """What `restore` takes."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = [state.cpu() for state in torch.cuda.get_rng_state_all()]
    return found


def restore(saved: dict[str, Any]) -> None:
    """Sets those that were saved (a program in C++ has torch's alone); devices that are not here
    are passed over.
    """
    if "python" in saved:
        random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if "numpy" in saved:
        import numpy

        numpy.random.set_state(saved["numpy"])
    if "cuda" in saved and torch.cuda.is_available():
        for device, value in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(value, device)
