"""Gradients that a script has put there itself: norms, and the backward passes that follow."""

import math

import checks
import drop_in
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

CHANGES = {
    "left": lambda p: None,
    "product": lambda p: setattr(p, "grad", p.grad * 10),
    "clone": lambda p: setattr(p, "grad", p.grad.clone()),
    "to": lambda p: setattr(p, "grad", p.grad.to(torch.float64).to(torch.float32)),
    "detach": lambda p: setattr(p, "grad", p.grad.detach()),
}


def torchs(norm_type, change):
    """The norm, and the whole gradients, of torch's fully_shard."""
    model = one_pass(models.theirs())
    changed(model, change)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    return norm.full_tensor(), [p.grad.full_tensor() for p in model.parameters()]


def one_pass(model):
    model(models.tokens(0))[1].backward()
    return model


def changed(model, change):
    for parameter in model.parameters():
        change(parameter)
    return model


def same_everywhere(value):
    """All ranks must have the same bits."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value.item())
    assert len(set(found)) == 1, found
    return value


def by_method(model, norm_type):
    return model.clip_grad_norm_(0.1, norm_type)


def by_function(model, norm_type):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)


def by_two_functions(model, norm_type):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with drop_in.installed():
        total = torch.nn.utils.get_total_norm(gradients, norm_type)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
    return total


WAYS = [
    (models.wrap, by_method),
    (models.wrap, by_function),
    (models.wrap, by_two_functions),
    (models.shard_plain, by_function),
    (models.shard_plain, by_two_functions),
]


def check_norms_are_torchs():
    for name, change in CHANGES.items():
        for norm_type in (2.0, 1.0, math.inf, 3, 0):
            wanted, gradients = torchs(norm_type, change)
            for make, clip in WAYS:
                model = changed(one_pass(make()), change)
                norm = same_everywhere(clip(model, norm_type))
                torch.testing.assert_close(norm, wanted, msg=lambda text, n=name: f"{n}: {text}")
                if make is models.shard_plain:
                    found = models.whole_gradients(model).values()
                    for whole, other in zip(found, gradients, strict=True):
                        torch.testing.assert_close(whole, other)


def check_what_comes_is_added_to_whole_gradients():
    """Of placements other than the parameter's."""
    once, twice = one_pass(models.shard()), one_pass(models.shard())
    for parameter in twice.parameters():
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    one_pass(twice)
    for parameter, wanted in zip(twice.parameters(), once.parameters(), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), 2 * wanted.grad.full_tensor())


def check_one_rank_replaces():
    wanted, _ = torchs(2.0, lambda p: None)
    for make, clip in WAYS:
        model = one_pass(make())
        if dist.get_rank() == 0:
            changed(model, CHANGES["clone"])
        torch.testing.assert_close(same_everywhere(clip(model, 2.0)), wanted)


def check_gradients_that_one_rank_lacks():
    for norm_type in (2.0, math.inf, -math.inf, -1.0):
        for make, clip in ((models.wrap, by_method), (models.shard_plain, by_function)):
            model = one_pass(make())
            if dist.get_rank() == 0:
                model.zero_grad()
            own = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            wanted = torch.linalg.vector_norm(torch.cat(own), norm_type) if own else torch.zeros(())
            dist.broadcast(wanted, src=1)
            torch.testing.assert_close(same_everywhere(clip(model, norm_type)), wanted)
    model = models.shard_plain()
    assert by_function(model, 2.0) == 0


def check_an_infinity_of_one_rank():
    for value in (math.inf, math.nan):
        for norm_type in (2.0, math.inf):
            for make, clip in WAYS:
                model = one_pass(make())
                if dist.get_rank() == 1:
                    weight = model.get_parameter("head.weight")
                    weight.grad = torch.full_like(weight.grad, value)
                norm = clip(model, norm_type)
                assert not norm.isfinite()
                assert norm.isnan() == math.isnan(value)
            model = one_pass(models.shard_plain())
            if dist.get_rank() == 0:
                model.head.weight.grad[0, 0] = value
            with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
                torch.nn.utils.clip_grad_norm_(
                    model.parameters(), 1.0, norm_type, error_if_nonfinite=True
                )


def check_with_ordinary_parameters():
    plain = torch.nn.Parameter(torch.ones(3))
    for change in CHANGES.values():
        model = changed(one_pass(models.shard_plain()), CHANGES["left"])
        alone = by_function(model, 2.0)
        model = one_pass(models.shard_plain())
        factor = 10 if change is CHANGES["product"] else 1
        changed(model, change)
        plain.grad = torch.tensor([1.0, 2.0, 3.0])
        norm = torch.nn.utils.clip_grad_norm_([plain, *model.parameters()], 1e6)
        torch.testing.assert_close(norm, (14 + (factor * alone) ** 2).sqrt())
        assert torch.equal(plain.grad, torch.tensor([1.0, 2.0, 3.0]))


def check_norms_of_parameters():
    model, plain = models.shard_plain(), models.build()
    wanted = torch.nn.utils.get_total_norm(list(plain.parameters()))
    with drop_in.installed():
        found = torch.nn.utils.get_total_norm(list(model.parameters()))
    torch.testing.assert_close(same_everywhere(found), wanted)


def check_get_total_norm_is_that_of_a_rank_without_the_drop_in():
    """As with torch's FullyShardedDataParallel; of DTensors it is that of all ranks there too."""
    model = one_pass(models.shard_plain())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    parts = torch.stack([gradient.norm() for gradient in gradients])
    own = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(own, parts.norm())
    squares = own.pow(2)
    dist.all_reduce(squares)
    torch.testing.assert_close(by_function(model, 2.0), squares.sqrt())


def check_whole_gradients_are_counted_once():
    model = one_pass(models.wrap())
    wanted = by_method(model, 2.0)
    model = one_pass(models.wrap())
    with type(model).summon_full_params(model, with_grads=True):
        torch.testing.assert_close(by_function(model, 2.0), wanted)


def check_the_norm_of_order_zero_counts_tensors():
    """Those that have a value other than 0 on some rank, as torch has it."""

    def cleared(model):
        model.blocks[0].up.weight.grad.zero_()
        for parameter in (model.blocks[1].up.bias, model.norm.weight):
            if dist.get_rank() == 0:
                getattr(parameter.grad, "_local_tensor", parameter.grad).zero_()
        return list(model.parameters())

    wanted = torch.nn.utils.clip_grad_norm_(cleared(one_pass(models.theirs())), 1e6, 0)
    ours = cleared(one_pass(models.shard_plain()))
    found = torch.nn.utils.clip_grad_norm_(ours, 1e6, 0)
    assert same_everywhere(found) == wanted.full_tensor() == len(ours) - 1
    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.tensor([0.0, 2.0, 3.0])
    assert torch.nn.utils.clip_grad_norm_([plain, *ours], 1e6, 0) == len(ours)
    if dist.get_rank() == 0:
        ours[0].grad = None
    assert torch.nn.utils.clip_grad_norm_(ours, 1e6, 0) == len(ours) - 1


def check_functions_that_were_imported_before():
    """The tests import torch before libddp shards anything."""
    wanted, _ = torchs(2.0, lambda p: None)
    torch.testing.assert_close(
        EARLY(changed(one_pass(models.shard_plain()), CHANGES["clone"]).parameters(), 1.0), wanted
    )


def replace(weight, tensor):
    weight.grad = tensor


def replace_data(weight, tensor):
    weight.grad.data = tensor


def pass_after(make, change, factor):
    """A second pass after `change(weight, tensor)` of a gradient, and what it must give."""
    reference = one_pass(make())
    wanted = reference.head.weight.grad.clone()
    model = one_pass(make())
    weight = model.head.weight
    tensor = torch.full_like(weight, 3.0) if factor == 0 else weight.grad * factor
    change(weight, tensor)
    held = weight.grad
    before = held.clone()
    one_pass(model)
    return weight, held, before + wanted


def check_new_gradients_are_added_to_a_scripts_own():
    for make in (models.shard_plain, models.wrap, unsharded):
        for change in (replace, replace_data):
            for factor in (0, 1, 10):
                weight, held, wanted = pass_after(make, change, factor)
                torch.testing.assert_close(weight.grad, wanted)
                assert weight.grad is held


def unsharded():
    return models.wrap(sharding_strategy=models.libddp_fsdp().ShardingStrategy.NO_SHARD)


def check_other_data_then_none():
    """Only this gradient is cleared: the others' memory stays."""
    for make in (models.shard_plain, models.wrap, unsharded):
        wanted = one_pass(make()).head.weight.grad.clone()
        for clears_all in (False, True):
            model = one_pass(make())
            weight = model.head.weight
            other = torch.full_like(weight, 3.0)
            weight.grad.data = other
            if clears_all:
                model.zero_grad()
            weight.grad = None
            one_pass(model)
            torch.testing.assert_close(weight.grad, wanted)
            assert other.eq(3).all()
            one_pass(model)
            torch.testing.assert_close(weight.grad, 2 * wanted)


def check_a_transposed_gradient():
    """The same memory in another order."""
    model = one_pass(unsharded())
    block = next(m for m in model.modules() if isinstance(m, torch.nn.Linear) and is_square(m))
    wanted = block.weight.grad.clone()
    block.weight.grad = block.weight.grad.t()
    one_pass(model)
    torch.testing.assert_close(block.weight.grad, wanted + wanted.t())


def is_square(linear):
    return linear.in_features == linear.out_features


def check_an_expanded_gradient():
    model = one_pass(models.shard_plain())
    wanted = model.head.weight.grad.clone()
    model.head.weight.grad = torch.ones(()).expand(wanted.shape)
    one_pass(model)
    torch.testing.assert_close(model.head.weight.grad, 1 + wanted)


def check_a_kept_gradient_keeps_its_values():
    """In whatever order gradients are cleared."""
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for make in (
        models.shard_plain,
        models.wrap,
        unsharded,
        lambda: models.shard_plain(mesh=replicas),
    ):
        for clears_all in (False, True):
            model = one_pass(make())
            weight = model.head.weight
            kept, values = weight.grad, weight.grad.clone()
            loss = model(models.tokens(1))[1]
            if clears_all:
                model.zero_grad()
            weight.grad = None
            loss.backward()
            assert weight.grad is not kept
            assert torch.equal(kept, values)
            assert not torch.equal(weight.grad, values) or not values.numel()


def check_the_memory_of_averages_stays_where_nobody_keeps_them():
    model = unsharded()
    places = set()
    for _ in range(3):
        one_pass(model)
        places.add(model.head.weight.grad.data_ptr())
        model.zero_grad()
    assert len(places) == 1


EARLY = torch.nn.utils.clip_grad_norm_

results, test_on_all_ranks = checks.suite(globals(), 2)
