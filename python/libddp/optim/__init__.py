"""Optimizers in C++ with torch's names: `from libddp.optim import AdamW`."""

from libddp.optim.adamw import AdamW

__all__ = ["AdamW"]
