"""libddp's counterparts of torch.utils."""

from libddp.utils import data

__all__ = ["data"]
