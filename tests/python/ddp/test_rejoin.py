"""DistributedDataParallel.rejoin: the same object over another group does what a new one would."""

import copy
import os

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import is_equal_on_all_ranks, wrap
from torch import nn

RANK = int(os.environ.get("RANK", 0))
_groups = {}


class Net(nn.Module):
    """With buffers that a forward changes, and a part whose backward may fail."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(7, 33), nn.BatchNorm1d(33)
        self.second, self.out = nn.Linear(33, 21), nn.Linear(21, 5)
        self.fails = False

    def forward(self, x):
        hidden = self.norm(self.first(x)).tanh()
        return self.out(Fails.apply(self.second(hidden), self.fails))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("in the middle of a pass")
        return gradient, None


def group_of(*members):
    """Made once; every rank calls it."""
    if members not in _groups:
        _groups[members] = dist.new_group(list(members))
    return _groups[members]


def batch(step):
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + RANK))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps=range(3)):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twin_of(model, optimizer, group, make=adamw, **arguments):
    """Newly built: the module with its values, the wrapper, the optimizer with its state."""
    module, state = copy.deepcopy(model.module), copy.deepcopy(optimizer.state_dict())
    for parameter in module.parameters():
        parameter.grad = None
    twin = wrap(module, process_group=group, **arguments)
    own = make(twin)
    own.load_state_dict(state)
    return twin, own


def assert_trains_like(model, optimizer, twin, own, steps=range(5, 9)):
    assert train(model, optimizer, steps) == train(twin, own, steps)
    for (name, a), b in zip(
        model.module.state_dict().items(), twin.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def _moves(members=(1, 2), **arguments):
    group = group_of(*members)
    model = wrap(Net(), **arguments)
    optimizer = adamw(model)
    train(model, optimizer)
    if RANK not in members:
        return
    parameters = list(model.parameters())
    twin, own = twin_of(model, optimizer, group, **arguments)
    model.rejoin(group)
    assert model.process_group is group
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert_trains_like(model, optimizer, twin, own)


def check_a_smaller_group_with_other_numbers():
    for as_view in (True, False):
        _moves(gradient_as_bucket_view=as_view)


def check_the_options_of_construction_hold():
    _moves(find_unused_parameters=True, bucket_cap_mb=0.001)
    _moves(static_graph=True)
    _moves(forward_sync_buffers=False)


def check_a_larger_group_and_back():
    group = group_of(0, 1)
    if RANK < 2:
        model = wrap(Net(), process_group=group)
        optimizer = adamw(model)
        train(model, optimizer)
        model.rejoin()  # survivors call it where newcomers wrap theirs
    else:
        model = wrap(Net())
        optimizer = adamw(model)
    assert model.process_group is dist.group.WORLD
    assert all(is_equal_on_all_ranks(p) for p in model.parameters())
    model(batch(0)).sum().backward()
    assert all(is_equal_on_all_ranks(p.grad) for p in model.parameters())
    if RANK < 2:
        model.rejoin(group)
        model(batch(1)).sum().backward()


def check_ranks_start_from_the_values_of_rank_0():
    group = group_of(1, 2)
    model = wrap(Net())
    if RANK == 0:
        return
    with torch.no_grad():
        model.module.out.bias.fill_(RANK)
        model.module.norm.running_mean.fill_(RANK)
    model.rejoin(group)
    assert model.module.out.bias.unique().tolist() == [1.0]
    assert model.module.norm.running_mean.unique().tolist() == [1.0]


def check_a_pass_that_broke_off_leaves_nothing():
    model = wrap(Net(), bucket_cap_mb=0.0001)
    optimizer = adamw(model)
    train(model, optimizer)
    twin, own = twin_of(model, optimizer, dist.group.WORLD, bucket_cap_mb=0.0001)
    buffers = copy.deepcopy(dict(model.module.named_buffers()))
    model.module.fails = True
    with pytest.raises(ValueError, match="in the middle of a pass"):
        model(batch(3)).sum().backward()  # the buckets of `out` have been sent
    model.module.fails = False
    with pytest.raises(RuntimeError, match="ended early"):
        model(batch(3))
    for name, buffer in model.module.named_buffers():
        buffer.copy_(buffers[name])
    model.rejoin()
    assert_trains_like(model, optimizer, twin, own)


def check_graphs_of_before_average_nothing():
    model = wrap(Net())
    before = model(batch(0)).sum()
    model.rejoin()
    before.backward()
    assert not is_equal_on_all_ranks(model.module.out.bias.grad + RANK)
    model.zero_grad()
    model(batch(1)).sum().backward()
    assert is_equal_on_all_ranks(model.module.out.weight.grad)


def check_hooks_of_users_and_comm_hooks_stay():
    group, seen, buckets = group_of(0, 2), [], []

    def half_of_the_sum(state, bucket):
        buckets.append(state)
        work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    model = wrap(Net())
    model.register_comm_hook(dist.group.WORLD, half_of_the_sum)
    model.module.out.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    model(batch(0)).sum().backward()
    assert buckets == [dist.group.WORLD]
    if RANK == 1:
        return
    model.rejoin(group)
    seen.clear()
    model(batch(1)).sum().backward()
    assert buckets[1:] == [group] * len(buckets[1:])
    assert len(buckets) > 1
    assert seen == [model.module.out.bias]
    assert torch.allclose(model.module.out.bias.grad, torch.full((5,), 4.0))
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, half_of_the_sum)


def check_compressed_gradients_stay_so():
    group = group_of(0, 2)
    model, plain = wrap(Net()), wrap(Net(), process_group=group) if RANK != 1 else None
    model.compress_gradients(torch.bfloat16)
    model(batch(0)).sum().backward()
    if RANK == 1:
        return
    model.rejoin(group)
    plain.compress_gradients(torch.bfloat16)
    for each in (model, plain):
        each.module.load_state_dict(Net().state_dict())
        each(batch(1)).sum().backward()
    assert torch.equal(model.module.first.weight.grad, plain.module.first.weight.grad)
    rounded = plain.module.first.weight.grad.bfloat16().float()
    assert torch.equal(rounded, model.module.first.weight.grad)


def check_what_was_set_later_holds():
    model = wrap(Net())
    model._set_static_graph()
    model.require_manual_backward_finalization = True
    model.rejoin()  # as a newcomer that is to set them
    assert model.static_graph
    model(batch(0)).sum().backward()
    model.finalize_backward()
    assert is_equal_on_all_ranks(model.module.out.weight.grad)
    with pytest.raises(RuntimeError, match="before the first backward pass"):
        model._set_static_graph()


def check_no_sync_and_join_that_broke_off_are_over():
    model = wrap(Net())
    model.require_backward_grad_sync = False
    model(batch(0)).sum().backward()
    try:
        with model.join():
            model(batch(0)).sum().backward()
            raise ValueError("a rank has died")
    except ValueError:
        pass
    assert model._join_config.enable
    model.rejoin()
    assert model.require_backward_grad_sync
    assert not model._join_config.enable
    model(batch(1)).sum().backward()
    assert is_equal_on_all_ranks(model.module.out.weight.grad)


def check_frozen_parameters_stay_so():
    model = wrap(Net(), find_unused_parameters=True)
    model.module.first.requires_grad_(False)
    model.rejoin()  # a newcomer has not frozen them yet
    assert not model.module.first.weight.requires_grad
    model(batch(0)).sum().backward()
    assert model.module.first.weight.grad is None
    model.module.first.requires_grad_(True)
    model(batch(1)).sum().backward()
    assert is_equal_on_all_ranks(model.module.first.weight.grad)


def check_mixed_precision_is_full_again():
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    group = group_of(1, 2)
    model = wrap(Net(), mixed_precision=precision)
    model(batch(0)).sum().backward()
    loss = model(batch(1)).sum()  # parameters are low until its backward pass
    assert model.module.out.weight.dtype == torch.bfloat16
    if RANK == 0:
        return
    if RANK == 1:
        model.rejoin(group)
    else:
        model = wrap(Net(), mixed_precision=precision, process_group=group)
    assert model.module.out.weight.dtype == torch.float32
    assert model.module.norm.running_mean.dtype == torch.bfloat16
    model(batch(2)).sum().backward()
    gathered = [torch.empty_like(model.module.out.weight) for _ in range(2)]
    dist.all_gather(gathered, model.module.out.weight.grad, group=group)
    assert torch.equal(*gathered)
    del loss


def check_delayed_parameters_stay_so():
    group, net = group_of(0, 1), Net()
    model = wrap(
        net,
        delay_all_reduce_named_params=[("first.weight", net.first.weight)],
        param_to_hook_all_reduce=net.first.bias,
    )
    model(batch(0)).sum().backward()
    if RANK == 2:
        return
    model.rejoin(group)
    assert net.first.weight.grad is None
    model(batch(1)).square().sum().backward()
    gathered = [torch.empty_like(net.first.weight) for _ in range(2)]
    dist.all_gather(gathered, net.first.weight.grad, group=group)
    assert torch.equal(*gathered)


def check_sharded_adamw():
    for shard_gradients in (False, True):
        _sharded(shard_gradients)


def _sharded(shard_gradients):
    from libddp.optim import AdamW

    def make(model):
        return AdamW(model.parameters(), lr=0.05, shard_over=model, shard_gradients=shard_gradients)

    group = group_of(1, 2)
    model = wrap(Net())
    optimizer = make(model)
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    if RANK == 0:
        return
    twin, own = wrap(copy.deepcopy(model.module), process_group=group), None
    own = make(twin)
    model.rejoin(group)
    model(batch(4)).sum().backward()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="Hint: call the optimizer's rejoin"):
            use()
    model.module.load_state_dict(twin.module.state_dict())
    optimizer.rejoin()
    assert not optimizer.state
    optimizer.load_state_dict(state)
    own.load_state_dict(state)
    assert_trains_like(model, optimizer, twin, own)


def check_over_a_group_that_is_gone():
    from libddp.distributed import destroy_process_group, new_group

    group = new_group([0, 1, 2])
    model = wrap(Net(), process_group=group)
    model(batch(0)).sum().backward()
    destroy_process_group(group)
    with pytest.raises(RuntimeError, match=r"has been shut down.*goes on in another.*rejoin\(\)"):
        model(batch(1)).sum().backward()
    model.rejoin()
    model(batch(1)).sum().backward()
    assert is_equal_on_all_ranks(model.module.out.weight.grad)


def check_over_a_group_that_has_failed_and_is_gone():
    from libddp.distributed import barrier, destroy_process_group, new_group
    from libddp.distributed._groups import native
    from libddp.errors import StateError

    group = new_group([0, 1, 2])
    model = wrap(nn.Linear(7, 2), process_group=group)
    barrier()  # of the other group: all have wrapped
    if RANK == 1:
        native(group).abort("as if it had died")
    with pytest.raises(RuntimeError, match="as if it had died"):
        model(batch(0)).sum().backward()
    destroy_process_group(group)
    # Not the failure of before, which would be others' doing.
    with pytest.raises(StateError, match=r"rejoin\(\)"):
        model(batch(1))
    model.rejoin()
    model(batch(1)).sum().backward()
    assert is_equal_on_all_ranks(model.module.weight.grad)


def check_a_rejoin_that_fails_can_be_repeated():
    model = wrap(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 2)))
    model.module[1].weight.data = torch.zeros(2, 7 + (RANK == 1))
    with pytest.raises(ValueError, match=r"rank 1 has parameter '1\.weight'"):
        model.rejoin()
    with pytest.raises(RuntimeError, match=r"its last rejoin\(\) failed"):
        model(batch(0))
    model.module[1].weight.data = torch.zeros(2, 7)
    model.rejoin()
    model(batch(0)).sum().backward()
    assert is_equal_on_all_ranks(model.module[0].weight.grad)


def check_nothing_of_the_groups_stays():
    from libddp.distributed import destroy_process_group, new_group

    model = wrap(nn.Sequential(nn.Linear(7, 500), nn.Linear(500, 500)))
    optimizer = adamw(model)
    counts = []
    for step in range(12):
        group = new_group([0, 1, 2])
        model.rejoin(group)
        train(model, optimizer, [step, step + 1])
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd" in line or "/dev/shm" in line for line in maps)
        found = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
        counts.append([*found, mapped])
        destroy_process_group(group)
    assert counts[2] == counts[-1], counts


results, test_on_all_ranks = checks.suite(globals(), 3)
