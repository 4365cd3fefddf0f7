"""Sharded training equals DDP's and that of torch's FSDP on Gloo.

At two ranks every average is exact in the order of its additions, so sharded and replicated
training agree bit for bit. torch's FSDP divides before and after its sum by factors of its own and
reduces whole flat arrays, and its optimizer sees flat arrays; it agrees within rounding.
"""

import checks
import ddp_models
import fsdp_models as models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

STEPS = 50


def ddp_losses(steps=STEPS):
    return models.train(ddp_models.wrap(models.build()), steps)


def is_exact():
    return dist.get_world_size() == 2


def same(ours, theirs, tolerance, absolute=0.0):
    torch.testing.assert_close(
        torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=absolute
    )


def check_strategies_equal_ddp():
    wanted = ddp_losses()
    for strategy in (
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    ):
        found = models.train(models.wrap(sharding_strategy=strategy), STEPS)
        if is_exact():
            assert found == wanted, strategy
        else:
            same(found, wanted, 1e-5)


def check_fully_shard_equals_ddp():
    found = models.train(models.shard(), STEPS)
    if is_exact():
        assert found == ddp_losses()
    else:
        same(found, ddp_losses(), 1e-5)


def check_equals_torchs_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    theirs = models.train(
        TorchFSDP(
            models.build(),
            process_group=ddp_models.gloo(),
            auto_wrap_policy=models.policy(),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        ),
        STEPS,
    )
    same(models.train(models.wrap(), STEPS), theirs, 1e-4)


def check_one_unit_for_everything():
    found = models.train(models.wrap(auto_wrap_policy=None), 10)
    same(found, ddp_losses(10), 0 if is_exact() else 1e-5)


def check_bf16_follows_fp32():
    from torch.distributed.fsdp import MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = models.train(models.wrap(mixed_precision=precision), 20)
    same(found, ddp_losses(20), 0.03, absolute=0.005)


def check_hybrid_equals_ddp():
    if dist.get_world_size() != 4:
        return
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = models.wrap(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    same(models.train(model, 20), ddp_losses(20), 1e-5)


results, test_parity = checks.suite(globals(), 2, 4)
