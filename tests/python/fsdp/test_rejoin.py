"""rejoin() of sharded models: the same objects over another group do what new ones would."""

import copy
import os

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from fsdp_states import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_state_dict,
)

RANK = int(os.environ.get("RANK", 0))
LOAD = StateDictOptions(full_state_dict=True)
_groups = {}


def group_of(*members):
    """Made once; every rank calls it."""
    if members not in _groups:
        _groups[members] = dist.new_group(list(members))
    return _groups[members]


def on(group, build):
    """How `build` and `rejoin` are told of a group."""
    if group is None:
        return {}
    if build is models.wrap:
        return {"process_group": group}
    return {"mesh": dist.DeviceMesh.from_group(group, "cpu")}


def rejoin(model, build, group=None):
    model.rejoin(*on(group, build).values())


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(models.tokens(step))[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def copied(state):
    return copy.deepcopy(state[0]), copy.deepcopy(state[1])


def load(model, optimizer, state):
    weights, moments = copied(state)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=LOAD
    )


def assert_trains_like(model, optimizer, twin, own, steps=range(5, 8)):
    assert train(model, optimizer, steps) == train(twin, own, steps)
    found, wanted = models.whole_parameters(model), models.whole_parameters(twin)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _moves(build, members=(1, 2), **arguments):
    """From all ranks to some, with other numbers."""
    group = group_of(*members)
    model = build(**arguments)
    optimizer = models.adamw(model.parameters())
    train(model, optimizer, range(3))
    state = copied(whole(model, optimizer))
    if RANK not in members:
        return
    twin = build(**arguments, **on(group, build))
    own = models.adamw(twin.parameters())
    load(twin, own, state)
    parameters = list(model.parameters())
    rejoin(model, build, group)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.grad is None for p in parameters)
    assert not optimizer.state, "moments of other rows"
    assert all(local(p).isnan().all() for p in parameters)
    load(model, optimizer, state)
    assert_trains_like(model, optimizer, twin, own)


def local(parameter):
    return getattr(parameter, "_local_tensor", parameter).detach()


def check_fsdp1_moves():
    _moves(models.wrap)


def check_dtensors_move():
    _moves(models.shard)


def check_plain_units_move():
    _moves(models.shard_plain)


def check_precisions_move():
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    low = torch.bfloat16
    _moves(models.wrap, mixed_precision=MixedPrecision(low, torch.float32, low))
    _moves(models.shard, mp_policy=MixedPrecisionPolicy(low, torch.float32))


def check_other_strategies_move():
    strategies = models.libddp_fsdp().ShardingStrategy
    _moves(models.wrap, sharding_strategy=strategies.SHARD_GRAD_OP)
    _moves(models.shard, reshard_after_forward=False)


def check_no_shard_moves():
    strategy = models.libddp_fsdp().ShardingStrategy.NO_SHARD
    group = group_of(0, 1)
    model = models.wrap(sharding_strategy=strategy)
    optimizer = models.adamw(model.parameters())
    train(model, optimizer, range(2))
    if RANK == 2:
        return
    model.rejoin(group)
    assert model.world_size == 2
    model.load_state_dict(models.build().state_dict())
    assert all(loss == loss for loss in train(model, optimizer, range(2)))


def check_offloaded_units_move():
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    _moves(models.wrap, cpu_offload=CPUOffload(offload_params=True))
    _moves(models.shard, offload_policy=CPUOffloadPolicy())


def _meets(build, **arguments):
    """Two survivors and a newcomer."""
    pair = group_of(0, 1)
    if RANK < 2:
        model = build(**arguments, **on(pair, build))
        optimizer = models.adamw(model.parameters())
        train(model, optimizer, range(2))
        rejoin(model, build)
    else:
        model = build(**arguments)
        optimizer = models.adamw(model.parameters())
    twin = build(**arguments)
    own = models.adamw(twin.parameters())
    train(twin, own, range(2))
    load(model, optimizer, whole(twin, own))
    assert_trains_like(model, optimizer, twin, own)


def check_newcomers_construct_where_survivors_rejoin():
    _meets(models.wrap)
    _meets(models.shard)
    _meets(models.shard_plain)


def check_newcomers_that_take_values_from_rank_0():
    _meets(models.wrap, sync_module_states=True)


def check_newcomers_on_the_meta_device():
    for build in (models.shard, models.shard_plain):
        pair = group_of(1, 2)
        arguments = {} if RANK == 0 else on(pair, build)
        model = build(models.on_meta(), **arguments) if RANK else None
        if RANK:
            model.to_empty(device="cpu")
            model.apply(models.reset)
            optimizer = models.adamw(model.parameters())
            train(model, optimizer, range(2))
            rejoin(model, build)
        else:
            model = build(models.on_meta())
            model.to_empty(device="cpu")
            optimizer = models.adamw(model.parameters())
        twin = build()
        own = models.adamw(twin.parameters())
        train(twin, own, range(2))
        load(model, optimizer, whole(twin, own))
        assert_trains_like(model, optimizer, twin, own)


def trained_beside_a_twin(build):
    """A model and its optimizer after two steps, their state, and another pair that has it."""
    model = build()
    optimizer = models.adamw(model.parameters())
    train(model, optimizer, range(2))
    state = copied(whole(model, optimizer))
    twin = build()
    own = models.adamw(twin.parameters())
    load(twin, own, state)
    return model, optimizer, state, twin, own


def check_a_pass_that_broke_off_leaves_nothing():
    for build in (models.wrap, models.shard):
        model, optimizer, state, twin, own = trained_beside_a_twin(build)
        loss = model(models.tokens(2))[1]
        hook = model.blocks[1].register_full_backward_pre_hook(_raise)
        broken = model(models.tokens(3))[1]
        with pytest.raises(ValueError, match="in the middle of a pass"):
            broken.backward()
        hook.remove()
        rejoin(model, build)
        del loss, broken
        load(model, optimizer, state)
        assert_trains_like(model, optimizer, twin, own)


def _raise(*_):
    raise ValueError("in the middle of a pass")


def check_a_forward_that_broke_off_leaves_nothing():
    for build in (models.wrap, models.shard, models.shard_plain):
        model, optimizer, state, twin, own = trained_beside_a_twin(build)
        hook = model.blocks[1].register_forward_hook(_raise)
        with pytest.raises(ValueError, match="in the middle of a pass"):
            model(models.tokens(3))
        hook.remove()
        rejoin(model, build)
        load(model, optimizer, state)
        assert_trains_like(model, optimizer, twin, own)


def check_hybrid_groups():
    strategy = models.libddp_fsdp().ShardingStrategy.HYBRID_SHARD

    def mesh():
        return dist.init_device_mesh("cpu", (1, 3))

    model = models.wrap(sharding_strategy=strategy, device_mesh=mesh())
    plain = models.shard(mesh=mesh())
    with pytest.raises(ValueError, match="needs a device_mesh of two dimensions"):
        model.rejoin(device_mesh=dist.DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    with pytest.raises(ValueError, match="sharded over a mesh of 2 dimensions"):
        plain.rejoin()
    model.rejoin(device_mesh=mesh())
    plain.rejoin(mesh())
    for each in (model, plain):
        with torch.no_grad():
            state = models.build().state_dict()
            each.load_state_dict(state)
        optimizer = models.adamw(each.parameters())
        assert all(loss == loss for loss in train(each, optimizer, range(2)))


def check_comm_hooks_stay():
    group, calls = group_of(0, 2), []

    def hook(state, gradients, average):
        calls.append(state)
        dist.reduce_scatter_tensor(average, gradients, group=state)
        average.div_(dist.get_world_size(state))

    model = models.wrap()
    model.register_comm_hook(dist.group.WORLD, hook)
    optimizer = models.adamw(model.parameters())
    train(model, optimizer, range(1))
    if RANK == 1:
        return
    model.rejoin(group)
    twin = models.wrap(process_group=group)
    own = models.adamw(twin.parameters())
    load(model, optimizer, whole(twin, own))
    calls.clear()
    assert_trains_like(model, optimizer, twin, own)
    assert set(map(id, calls)) == {id(group)}


def check_hooks_of_users_stay():
    for build in (models.wrap, models.shard, models.shard_plain):
        seen = []
        model = build()
        bias = model.blocks[0].up.bias
        bias.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p))
        model(models.tokens(0))[1].backward()
        assert len(seen) == 1
        rejoin(model, build)
        model.load_state_dict(get_model_state_dict(model))
        model(models.tokens(1))[1].backward()
        assert [id(p) for p in seen] == [id(bias)] * 2


def check_states_of_optimizers_that_have_not_stepped():
    for build in (models.wrap, models.shard):
        model = build()
        optimizer = models.adamw(model.parameters())
        train(model, optimizer, range(1))
        loaded, other = models.adamw(model.parameters()), models.adamw([torch.ones(3)])
        loaded.load_state_dict(optimizer.state_dict())
        del optimizer
        (own,) = other.param_groups[0]["params"]
        other.state[own] = {"step": torch.ones(())}
        rejoin(model, build)
        assert not loaded.state
        assert list(other.state) == [own]


def check_copies_rejoin():
    group = group_of(1, 2)
    original = models.wrap()
    model = copy.deepcopy(original)
    if RANK == 0:
        original(models.tokens(0))[1].backward()
        return
    model.rejoin(group)
    twin = models.wrap(process_group=group)
    optimizer, own = models.adamw(model.parameters()), models.adamw(twin.parameters())
    load(model, optimizer, whole(twin, own))
    original(models.tokens(0))[1].backward()  # which has stayed where it was
    assert original.world_size == 3
    assert_trains_like(model, optimizer, twin, own)


def check_only_the_outermost_module_rejoins():
    model = models.wrap()
    model(models.tokens(0))
    with pytest.raises(RuntimeError, match="is a part of a sharded model"):
        model.blocks[0].rejoin()
    sharded = models.shard()
    sharded(models.tokens(0))
    with pytest.raises(RuntimeError, match="is a part of a sharded model"):
        sharded.blocks[0].rejoin()


def check_a_rejoin_that_fails_can_be_repeated():
    from libddp.distributed import destroy_process_group, new_group

    for build in (models.wrap, models.shard):
        group = new_group([0, 1, 2])
        mesh = on(group, build)
        model = build()
        optimizer = models.adamw(model.parameters())
        train(model, optimizer, range(1))
        state = copied(whole(model, optimizer))
        destroy_process_group(group)
        with pytest.raises((RuntimeError, ValueError)):
            model.rejoin(*mesh.values())
        with pytest.raises(RuntimeError, match=r"rejoin\(\)"):
            model(models.tokens(0))
        rejoin(model, build)
        load(model, optimizer, state)
        assert all(loss == loss for loss in train(model, optimizer, range(1)))


def check_over_a_group_that_is_gone():
    from libddp.distributed import destroy_process_group, new_group

    for build in (models.wrap, models.shard):
        group = new_group([0, 1, 2])
        model = build(**on(group, build))
        model(models.tokens(0))[1].backward()
        destroy_process_group(group)
        with pytest.raises(RuntimeError, match=r"has been shut down.*rejoin\(\)"):
            model(models.tokens(1))
        rejoin(model, build)
        model.load_state_dict(models.build().state_dict())
        model(models.tokens(1))[1].backward()


def check_nothing_of_the_groups_stays():
    from libddp.distributed import destroy_process_group, new_group

    for build in (models.wrap, models.shard):
        model = build()
        optimizer = models.adamw(model.parameters())
        state = copied(whole(model, optimizer))
        counts = []
        for step in range(12):
            group = new_group([0, 1, 2])
            rejoin(model, build, group)
            load(model, optimizer, state)
            train(model, optimizer, [step])
            with open("/proc/self/maps") as maps:
                mapped = sum("memfd" in line or "/dev/shm" in line for line in maps)
            found = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
            counts.append([*found, mapped])
            destroy_process_group(group)
        assert counts[3] == counts[-1], counts
        rejoin(model, build)


def check_what_cannot_go_on_is_refused():
    fsdp = models.libddp_fsdp()
    model = models.wrap(auto_wrap_policy=None)
    inner = nn.Linear(4, 4)
    fsdp.fully_shard(inner)
    model.module.add_module("more", inner)
    with pytest.raises(ValueError, match="was sharded by fully_shard, inside"):
        model.rejoin()


results, test_on_all_ranks = checks.suite(globals(), 3)
