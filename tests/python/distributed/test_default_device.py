"""A script's `with torch.device("meta")`, or another default dtype, is not ours."""

import checks
import torch
import torch.distributed as dist
from torch import nn

META = torch.device("meta")


def wrappers():
    from libddp.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from libddp.nn.parallel import DistributedDataParallel

    return (
        DistributedDataParallel,
        FullyShardedDataParallel,
        fully_shard,
        lambda module: fully_shard(module, use_dtensor=False),
    )


def x():
    return torch.ones(2, 3, device="cpu")


def check_wrapping_and_training_inside():
    from libddp.optim import AdamW

    for wrap in wrappers():
        module = nn.Linear(3, 4)
        with META:
            model = wrap(module)
            optimizer = AdamW(model.parameters())
            for _ in range(2):
                model(x()).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
            model.load_state_dict(model.state_dict())
        assert all(p.device.type == "cpu" for p in model.parameters())


def check_models_that_are_built_and_sharded_inside():
    from libddp.distributed.fsdp import fully_shard

    for arguments in ({}, {"use_dtensor": False}):
        with META:
            model = fully_shard(nn.Linear(3, 4), **arguments)
        assert model.weight.is_meta
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        model.reset_parameters()
        model(x()).sum().backward()
        assert model.weight.grad.device.type == "cpu"


def check_sharded_optimizers_inside():
    from libddp.nn.parallel import DistributedDataParallel

    from libddp.optim import AdamW

    model = DistributedDataParallel(nn.Linear(3, 4))
    with META:
        optimizer = AdamW(model.parameters(), shard_over=model)
        model(x()).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


def check_steps_of_sharded_optimizers_are_float32():
    from libddp.nn.parallel import DistributedDataParallel

    from libddp.optim import AdamW

    model = DistributedDataParallel(nn.Linear(3, 4))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = AdamW(model.parameters(), shard_over=model)
        model(x().float()).sum().backward()
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    steps = [entries["step"] for entries in optimizer.state_dict()["state"].values()]
    assert [(step.dtype, step.item()) for step in steps] == [(torch.float32, 1.0)] * len(steps)


def check_collectives_inside():
    value = torch.ones(3)
    with META:
        dist.all_reduce(value)
        outputs = [torch.empty(3, device="cpu") for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, value)
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank())
        dist.barrier()
    assert found == list(range(dist.get_world_size()))
    assert all(torch.equal(output, value) for output in outputs)


results, test_on_two_ranks = checks.suite(globals(), 2)
