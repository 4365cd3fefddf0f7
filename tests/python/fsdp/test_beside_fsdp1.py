"""What scripts ask of a FullyShardedDataParallel, beside torch's class on Gloo: four ranks."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

HYBRID = ShardingStrategy.HYBRID_SHARD


def wrapped_by(face, module, **arguments):
    if face is torchs.FullyShardedDataParallel:
        arguments.setdefault("use_orig_params", True)
    return face(module, device_id=torch.device("cpu"), **arguments)


def both(probe, tolerance=None):
    """What `probe(face, groups)` finds with libddp's class is what it finds with torch's; numbers
    to a relative `tolerance`.

    Groups: of all ranks, of this rank's half, and of its place in both halves.
    """
    mine = dist.get_rank()
    found = []
    faces = (
        (torchs.FullyShardedDataParallel, "gloo"),
        (models.libddp_fsdp().FullyShardedDataParallel, None),
    )
    for face, backend in faces:
        every = dist.new_group(backend=backend)
        halves = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [2, 3])]
        places = [dist.new_group(ranks, backend=backend) for ranks in ([0, 2], [1, 3])]
        torch.manual_seed(0)
        found.append(probe(face, (every, halves[mine // 2], places[mine % 2])))
    assert found[1] == (pytest.approx(found[0], rel=tolerance) if tolerance else found[0])
    return found[1]


def check_its_group_is_the_one_that_it_shards_over():
    def probe(face, groups):
        every, half, place = groups
        models_ = [
            wrapped_by(face, nn.Linear(2, 2), process_group=half),
            wrapped_by(
                face, nn.Linear(2, 2), process_group=(half, place), sharding_strategy=HYBRID
            ),
            wrapped_by(
                face,
                nn.Linear(2, 2),
                process_group=every,
                sharding_strategy=ShardingStrategy.NO_SHARD,
            ),
        ]
        ranks = dist.get_process_group_ranks
        return [(ranks(m.process_group), m.rank, m.world_size) for m in models_]

    of_half, of_hybrid, of_all = both(probe)
    assert of_half == of_hybrid != of_all


def check_the_first_rank_of_the_group_gets_the_state():
    configs = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))

    def probe(face, groups):
        half = groups[1]
        model = wrapped_by(face, nn.Linear(4, 2), process_group=half)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with face.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            state = model.state_dict()
            moments = face.optim_state_dict(model, optimizer, group=half)
        older = face.full_optim_state_dict(model, optimizer, group=half)
        return [sorted(each) for each in (state, moments, older)]

    both(probe)


def check_what_is_not_sharded_each_rank_gives():
    def probe(face, groups):
        strategy = ShardingStrategy.NO_SHARD
        model = wrapped_by(
            face, nn.BatchNorm1d(4), process_group=groups[0], sharding_strategy=strategy
        )
        config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with face.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return sorted(model.state_dict())

    assert both(probe)


class Counted(nn.Linear):
    """Has a state of its own."""

    def get_extra_state(self):
        return torch.tensor(1 + dist.get_rank())

    def set_extra_state(self, state):
        pass


def check_other_ranks_have_the_extra_state_of_modules():
    if torch.__version__ < (2, 15):
        return  # torch's own ends by a SIGSEGV there

    def probe(face, groups):
        model = wrapped_by(face, nn.Sequential(nn.Linear(4, 4), Counted(4, 4)))
        config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with face.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return [model.state_dict()["1._extra_state"].item(), len(model.state_dict())]

    both(probe)


def check_a_largest_norm_is_over_ignored_modules_of_all_ranks():
    def probe(face, groups):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model = wrapped_by(face, model, ignored_modules=[model[1]])
        (model(torch.ones(1, 4)) * (1 + 9 * dist.get_rank())).sum().backward()
        norm = model.clip_grad_norm_(0.1, float("inf"))
        with face.summon_full_params(model, with_grads=True, writeback=False):
            return norm.item(), [round(g, 6) for g in model.module[0].weight.grad[0].tolist()]

    both(probe)


def check_norms_of_half_precision_are_float32s():
    def probe(face, groups):
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]).bfloat16()
        model = wrapped_by(face, model, process_group=groups[0])
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
        model(40 * batch.bfloat16()).float().pow(2).sum().backward()
        norm = model.clip_grad_norm_(1.0)
        with face.summon_full_params(model, with_grads=True, writeback=False):
            gradients = [p.grad.float() for p in model.parameters()]
        assert norm.dtype == torch.bfloat16
        return norm.item(), torch.cat([g.flatten() for g in gradients]).norm().item()

    _, after = both(probe, tolerance=2**-8)  # one rounding
    assert after == pytest.approx(1.0, rel=2**-8)


def check_norms_are_over_experts_of_all_ranks():
    def probe(face, groups):
        every, half, _ = groups
        torch.manual_seed(1)
        first = nn.Linear(4, 4)
        torch.manual_seed(dist.get_rank() // 2)  # another expert in each half
        expert = wrapped_by(face, nn.Linear(4, 4), process_group=half)
        model = wrapped_by(face, nn.Sequential(first, expert), process_group=every)
        model(torch.ones(1, 4) * (1 + dist.get_rank())).pow(2).sum().backward()
        if face is not torchs.FullyShardedDataParallel:  # torch's function has each rank's norm
            largest = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            torch.testing.assert_close(largest, model.clip_grad_norm_(float("inf")))
        norm = model.clip_grad_norm_(1.0)
        with face.summon_full_params(model, with_grads=True, writeback=False):
            return round(norm.item(), 4), [round(g, 4) for g in first.bias.grad.tolist()]

    both(probe)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4, device="meta"))
        self.last = nn.Linear(4, 4, device="meta")

    def forward(self, x):
        return self.last(self.inner(x))


def check_modules_get_their_values_level_by_level():
    def by_reset(face, groups):
        model = wrapped_by(face, nn.Sequential(Block(), Block()), process_group=groups[0])
        with face.summon_full_params(model):
            return [p.sum().item() for p in model.parameters()]

    def by_function(face, groups):
        called = []

        def init(module):
            called.append(type(module).__name__)
            module.to_empty(device="cpu", recurse=False)

        wrapped_by(face, Block(), process_group=groups[0], param_init_fn=init)
        return called

    both(by_reset)
    assert both(by_function) == ["Block", "Sequential", "Linear", "Linear"]


def trained(face, group, **arguments):
    model = wrapped_by(
        face, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), process_group=group, **arguments
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).pow(2).sum().backward()
    optimizer.step()


def check_states_that_were_kept_are_restored():
    """A script keeps the best state, trains on, and goes back, twice."""

    def values(face, model):
        with face.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]

    def probe(face, groups):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            model, optimizer = trained(face, groups[0], sharding_strategy=strategy)
            wanted = values(face, model)
            with face.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                best = model.state_dict(), face.optim_state_dict(model, optimizer)
            kept = local_moments(best[1])
            before = [each.clone() for each in kept]
            for _ in range(2):
                step(model, optimizer)
                with face.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                    model.load_state_dict(best[0])
                assert all(map(torch.equal, values(face, model), wanted))
            assert all(map(torch.equal, kept, before))

    both(probe)


def local_moments(state):
    """Of those that are shards."""
    moments = [entry["exp_avg"] for entry in state["state"].values()]
    return [
        shard.tensor
        for moment in moments
        if hasattr(moment, "local_shards")
        for shard in moment.local_shards()
    ]


def check_states_of_parts():
    def probe(face, groups):
        model, _ = trained(face, groups[0])
        part = model.module[0]
        found = []
        for keeps in (True, False):
            options = dcp.StateDictOptions(keep_submodule_prefixes=keeps)
            found.append(
                sorted(dcp.get_model_state_dict(model, submodules={part}, options=options))
            )
        return found

    assert both(probe) == [["0.bias", "0.weight"], ["bias", "weight"]]


def check_a_state_that_lacks_a_parameter_is_refused():
    def probe(face, groups):
        model, optimizer = trained(face, groups[0])
        state = dcp.get_optimizer_state_dict(model, optimizer)
        del state["state"]["1.weight"]
        with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter '1.weight'"):
            dcp.set_optimizer_state_dict(model, optimizer, state)

    both(probe)


def check_what_an_optimizer_keeps_beside_states():
    def probe(face, groups):
        model, optimizer = trained(face, groups[0])
        optimizer.state["steps"] = 7
        state = face.optim_state_dict(model, optimizer)
        loaded = face.optim_state_dict_to_load(model, optimizer, state)
        return state["state"]["steps"], loaded["state"]["steps"]

    assert both(probe) == (7, 7)


def check_states_of_two_optimizers_that_have_no_tensors():
    """Each gets its own parameters' alone, and what the other has is not taken for a count."""
    face = models.libddp_fsdp().FullyShardedDataParallel
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = face(net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in net]
    for optimizer in optimizers:
        step(model, optimizer)
    state = dcp.get_optimizer_state_dict(model, optimizers)
    dcp.set_optimizer_state_dict(model, optimizers, state)
    for optimizer, layer in zip(optimizers, net, strict=True):
        assert set(map(id, optimizer.state)) <= set(map(id, layer.parameters()))


def check_states_without_the_optimizer_of_a_model_with_frozen_parameters():
    """torch leaves states out on ranks that have none of a parameter."""
    face = models.libddp_fsdp().FullyShardedDataParallel
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    model = face(net)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    step(model, optimizer)
    full = face.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert sorted(full["state"]) == ["1.bias", "1.weight"]
    optimizer.load_state_dict(face.shard_full_optim_state_dict(full, model))
    optimizer.load_state_dict(face.scatter_full_optim_state_dict(full, model))
    step(model, optimizer)


def check_a_patched_state_dict():
    def probe(face, groups):
        model, _ = trained(face, groups[0])
        dcp._patch_model_state_dict(model)
        return sorted(model.state_dict())

    both(probe)


def check_a_state_dict_by_place():
    """Arguments as torch took them formerly: destination, prefix, keep_vars."""

    def probe(face, groups):
        model, _ = trained(face, groups[0])
        return sorted(model.state_dict(None, "p.", False))

    both(probe)


def check_marks_for_trainers():
    def probe(face, groups):
        model = wrapped_by(face, nn.Sequential(nn.Linear(2, 2)), process_group=groups[0])
        flattened = [getattr(p, "_fsdp_flattened", False) for p in model.parameters()]
        return [getattr(m, "_is_fsdp_managed_module", False) for m in model.module.modules()], all(
            flattened
        )

    assert both(probe) == ([True, True], True)


results, test_on_four_ranks = checks.suite(globals(), 4)
