"""libddp's counterparts of torch.nn: only `parallel` so far."""

from libddp.nn import parallel

__all__ = ["parallel"]
