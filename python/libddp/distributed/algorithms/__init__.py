"""libddp's counterparts of torch.distributed.algorithms: activation checkpointing only."""
