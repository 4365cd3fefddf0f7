"""libddp's counterparts of torch.utils. `checkpoint` loads the extension when it is asked for."""

from importlib import import_module

from libddp.utils import data

__all__ = ["checkpoint", "data"]


def __getattr__(name: str):
    if name == "checkpoint":
        return import_module("libddp.utils.checkpoint")
    raise AttributeError(f"module 'libddp.utils' has no attribute {name!r}")
