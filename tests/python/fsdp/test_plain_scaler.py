"""torch's own GradScaler with sharded models: all ranks skip a step, or none does."""

import math

import checks
import fsdp_models as models
import torch
import torch.distributed as dist


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def of_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def one_step(model, optimizer, scaler, spoil, unscales):
    """Whether the step was taken, on each rank."""
    before = [local(p).detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    scaler.scale(model(models.tokens(0))[1]).backward()
    spoil(model)
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    pairs = zip(model.parameters(), before, strict=True)
    return of_all_ranks(any(not torch.equal(local(p), old) for p, old in pairs))


def on_rank(rank, change):
    def spoil(model):
        if dist.get_rank() == rank:
            change(model)

    return spoil


def fill_infinite(model):
    local(model.norm.weight.grad).fill_(math.inf)
    local(model.head.weight.grad).fill_(math.nan)


def replace_by_infinite(model):
    weight = model.head.weight
    local(weight.grad).fill_(math.inf)
    weight.grad = weight.grad * 1


def check_an_overflow_on_one_rank():
    makes = (models.shard, models.shard_plain, models.wrap)
    if dist.get_world_size() == 4:
        makes = (models.shard_plain_hybrid, models.wrap_hybrid)
    last = dist.get_world_size() - 1
    for make in makes:
        for make_optimizer in (sgd, fused_adamw):
            for unscales in (False, True):
                for change in (fill_infinite, replace_by_infinite):
                    model = make()
                    optimizer = make_optimizer(model.parameters())
                    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
                    spoil = on_rank(last, change)
                    taken = one_step(model, optimizer, scaler, spoil, unscales)
                    assert taken == [False] * len(taken), taken
                    assert of_all_ranks(scaler.get_scale()) == [32.0] * len(taken)
                    taken = one_step(model, optimizer, scaler, lambda _: None, unscales)
                    assert taken == [True] * len(taken), taken
                    assert of_all_ranks(scaler.get_scale()) == [32.0] * len(taken)


def check_the_sharded_scaler():
    """Also where all ranks overflow, which torch's adds up to more than fused optimizers know."""
    from libddp.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    last = dist.get_world_size() - 1
    for make in (models.shard, models.wrap):
        for make_optimizer in (sgd, fused_adamw):
            for unscales in (False, True):
                for spoil in (on_rank(last, fill_infinite), fill_infinite):
                    model = make()
                    optimizer = make_optimizer(model.parameters())
                    scaler = ShardedGradScaler("cpu", init_scale=64.0)
                    taken = one_step(model, optimizer, scaler, spoil, unscales)
                    assert taken == [False] * len(taken), taken
                    taken = one_step(model, optimizer, scaler, lambda _: None, unscales)
                    assert taken == [True] * len(taken), taken
                    assert of_all_ranks(scaler.get_scale()) == [32.0] * len(taken)
                    steps = {entry["step"].item() for entry in optimizer.state.values()}
                    assert steps <= {1.0}


def check_a_rank_without_gradients():
    """Of DTensors torch asks the gradients, so ranks must have the same ones."""
    model = models.shard_plain()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    spoil = on_rank(0, lambda model: model.zero_grad())
    taken = one_step(model, sgd(model.parameters()), scaler, spoil, unscales=False)
    assert taken == [rank > 0 for rank in range(len(taken))]
    assert of_all_ranks(scaler.get_scale()) == [64.0] * len(taken)


def check_values_of_a_scaled_step():
    plain = models.shard()
    models.train(plain, 2, sgd)
    scaled = models.shard()
    optimizer = sgd(scaled.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(scaled(models.tokens(step))[1]).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    for mine, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(local(mine), local(other))


results, test_on_all_ranks = checks.suite(globals(), 2, 4)
