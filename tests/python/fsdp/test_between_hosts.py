"""Units whose ranks share no memory: blocks are gathered and put together; the losses are alike."""

import ranks


def losses(hosts: bool):
    """Of all kinds of sharding; with `hosts` each rank is on a host of its own."""
    if hosts:
        ranks.live_apart()
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("gloo")
    import fsdp_models as models
    import torch

    bf16 = models.libddp_fsdp().MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = [
        models.train(make(), 4)
        for make in (
            models.shard,
            models.shard_plain,
            models.wrap,
            lambda: models.shard(mp_policy=bf16),
            lambda: models.shard(reshard_after_forward=False),
        )
    ]
    destroy_process_group()
    return found


def test_what_is_gathered_is_what_is_shared():
    assert ranks.run(losses, 2, True) == ranks.run(losses, 2, False)
