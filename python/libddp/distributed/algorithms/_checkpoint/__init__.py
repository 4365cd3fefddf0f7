"""libddp's counterpart of torch.distributed.algorithms._checkpoint."""
