"""Communication hooks of FullyShardedDataParallel, torch's and a script's own."""

import checks
import ddp_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import ShardingStrategy

SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


def torchs(strategy, hook, state):
    """Under torch's class, on Gloo."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        models.build(),
        process_group=ddp_models.gloo(),
        sharding_strategy=strategy,
        auto_wrap_policy=models.policy(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model.register_comm_hook(state(ddp_models.gloo()), hook)
    return model


def ours(strategy, hook, state):
    model = models.wrap(sharding_strategy=strategy)
    model.register_comm_hook(state(dist.group.WORLD), hook)
    return model


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def check_torchs_hooks_give_torchs_losses():
    """Its low-precision hooks need a GPU's streams."""
    state = default_hooks.DefaultState
    cases = [
        *((strategy, default_hooks.reduce_scatter_hook, state) for strategy in SHARDED),
        (ShardingStrategy.NO_SHARD, default_hooks.allreduce_hook, state),
    ]
    for case in cases:
        found, wanted = (models.train(wrap(*case), 4, sgd) for wrap in (ours, torchs))
        assert found == wanted, case[0]


def average(log, gradients, part=None):
    """What libddp does by itself."""
    log.append((gradients.numel(), None if part is None else part.numel()))
    whole = gradients if part is None else gradients.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    if part is not None:
        part.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def check_a_scripts_own_hook():
    for strategy in (*SHARDED, ShardingStrategy.NO_SHARD):
        log = []
        model = models.wrap(sharding_strategy=strategy)
        model.register_comm_hook(log, average)
        found = models.train(model, 3)
        assert found == models.train(models.wrap(sharding_strategy=strategy), 3)
        num_units = len(model.fsdp_modules(model))
        assert len(log) == 3 * num_units
        for whole, part in log:
            assert part in (None, whole // dist.get_world_size())


def check_passes_that_do_not_average():
    def accumulated(model):
        for step in range(3):
            if step < 2:
                with model.no_sync():
                    model(models.tokens(step))[1].backward()
            else:
                model(models.tokens(step))[1].backward()
        return [p.grad.clone() for p in model.parameters()]

    log = []
    model = models.wrap()
    model.register_comm_hook(log, average)
    found, wanted = accumulated(model), accumulated(models.wrap())
    assert all(map(torch.equal, found, wanted))
    assert len(log) == len(model.fsdp_modules(model))


def check_errors_of_hooks_keep_their_class():
    model = models.wrap()

    def fail(state, gradients, part):
        raise KeyError("mine")

    model.register_comm_hook(None, fail)
    with pytest.raises(KeyError, match="mine"):
        model(models.tokens(0))[1].backward()


def check_refusals():
    model = models.wrap()
    with pytest.raises(ValueError, match="must be callable but got 3"):
        model.register_comm_hook(None, 3)
    model(models.tokens(0))
    inner = next(m for m in model.fsdp_modules(model) if m is not model)
    with pytest.raises(RuntimeError, match="can only be called on a root instance"):
        inner.register_comm_hook([], average)
    model.register_comm_hook([], average)
    with pytest.raises(ValueError, match="A communication hook is already registered"):
        model.register_comm_hook([], average)


def check_hybrid_sharding_is_refused():
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()))
    model = models.wrap(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    with pytest.raises(ValueError, match="unsupported for hybrid sharding"):
        model.register_comm_hook([], average)


results, test_on_two_ranks = checks.suite(globals(), 2)
