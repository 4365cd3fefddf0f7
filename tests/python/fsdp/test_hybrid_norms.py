"""Gradient norms where parameters are divided in each of two groups (HYBRID_SHARD, 2 x 2)."""

import math

import checks
import drop_in
import fsdp_models as models
import torch
import torch.distributed as dist

ORDERS = (2.0, 1.0, math.inf, -math.inf, 0)


def left(model):
    return model


def replaced(model):
    """By values away from zero, so that the smallest one says something."""
    for parameter in model.parameters():
        parameter.grad = parameter.grad.abs() * 100 + 1
    return model


def of_all_batches():
    """A plain model with the gradients that all ranks average."""
    model, ranks = models.build(), range(dist.get_world_size())
    for rank in ranks:
        generator = torch.Generator().manual_seed(rank)
        loss = model(torch.randint(13, (2, 6), generator=generator))[1]
        (loss / len(ranks)).backward()
    return model


def one_pass(model):
    model(models.tokens(0))[1].backward()
    return model


def by_method(model, order):
    return model.clip_grad_norm_(1e6, order)


def by_function(model, order):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6, order)


def by_total(model, order):
    with drop_in.installed():
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], order)


def check_norms_are_those_of_one_process():
    ways = ((models.shard_plain_hybrid, by_function), (models.shard_plain_hybrid, by_total))
    for make, clip in (*ways, (models.wrap_hybrid, by_method), (models.wrap_hybrid, by_function)):
        for change in (left, replaced):
            whole, model = change(of_all_batches()), change(one_pass(make()))
            for order in ORDERS:
                wanted = by_total(whole, order)
                found = clip(model, order)
                torch.testing.assert_close(found, wanted, msg=lambda text, o=order: f"{o}: {text}")
                everywhere = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, found.item())
                assert len(set(everywhere)) == 1, everywhere


def check_one_replica_replaces_its_gradients():
    for order in ORDERS:
        model = one_pass(models.shard_plain_hybrid())
        if dist.get_rank() < 2:
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clone()
        torch.testing.assert_close(by_function(model, order), by_total(of_all_batches(), order))


results, test_on_all_ranks = checks.suite(globals(), 4)
