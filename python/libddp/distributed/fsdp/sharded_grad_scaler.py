"""torch's ShardedGradScaler, which asks all ranks of a group whether a gradient overflowed."""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
