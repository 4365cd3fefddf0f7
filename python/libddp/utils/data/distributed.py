"""torch's DistributedSampler, under libddp's path: it asks torch.distributed for rank and world
size, which libddp.distributed.init_process_group has set up."""

from torch.utils.data.distributed import DistributedSampler

__all__ = ["DistributedSampler"]
