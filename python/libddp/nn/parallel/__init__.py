"""Data-parallel training, under the names of torch.nn.parallel."""

from libddp.nn.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
