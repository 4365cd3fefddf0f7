"""libddp's counterparts of torch.utils.data."""

from libddp.utils.data import distributed
from libddp.utils.data.distributed import DistributedSampler

__all__ = ["DistributedSampler", "distributed"]
