"""Sharded state of plain tensors, and torch's functions for state dicts on sharded models."""

import copy
import io

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_states import FROM_RANK_0, RANK_0, WHOLE, assert_equal, make, narrow, whole
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def check_pieces_are_what_this_rank_owns():
    model = models.shard_plain()
    state = model.state_dict()
    assert list(state) == list(models.TinyGpt().state_dict())
    plain = models.build().state_dict()
    mine = sum(value.to_local().numel() for key, value in state.items() if key != "head.weight")
    assert mine < 0.7 * sum(p.numel() for p in models.build().parameters())
    for key, value in state.items():
        assert value.size() == plain[key].shape
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), plain[key]), key
    with torch.no_grad():
        model.norm.weight.add_(1)  # the pieces are the parameters' memory
    assert torch.equal(state["norm.weight"].full_tensor(), plain["norm.weight"] + 1)


def check_fsdp1_gives_what_torch_gives():
    """ShardedTensors with torch's chunks; DTensors where a mesh is given."""
    fsdp = models.libddp_fsdp()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for arguments, kind in (({}, ShardedTensor), ({"device_mesh": mesh}, DTensor)):
        model, optimizer = make(lambda m, a=arguments: models.wrap(m, **a), steps=1)
        full, moments = (
            model.state_dict(),
            fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer),
        )
        fsdp.FullyShardedDataParallel.set_state_dict_type(
            model, fsdp.StateDictType.SHARDED_STATE_DICT
        )
        config = fsdp.FullyShardedDataParallel.get_state_dict_type(model).state_dict_config
        assert config._use_dtensor == (kind is DTensor)
        state = model.state_dict()
        assert list(state) == list(full)
        with fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            summoned = model.state_dict()  # verl takes LoRA's weights so
            parts = model._fsdp_wrapped_module.state_dict()
            assert isinstance(parts["blocks.0.up.weight"], kind)
        for key, value in (*state.items(), *summoned.items()):
            assert_is_chunk(value, full[key], kind)
        found = fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        for name, entries in found.items():
            assert_is_chunk(entries["exp_avg"], moments["state"][name]["exp_avg"], kind)
            assert type(entries["step"]) is torch.Tensor
    fsdp.FullyShardedDataParallel.set_state_dict_type(model, fsdp.StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(RuntimeError, match="DeviceMesh is not compatible with LOCAL_STATE_DICT"):
        model.state_dict()


def assert_is_chunk(value, whole, kind):
    chunks = whole.chunk(dist.get_world_size())
    own = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else whole[:0]
    assert isinstance(value, kind)
    assert value.size() == whole.shape
    if kind is DTensor:
        assert torch.equal(value.to_local(), own)
        return
    shards = value.local_shards()
    assert torch.equal(shards[0].tensor if shards else whole[:0], own)
    wanted = []
    for rank, chunk in enumerate(chunks):
        first = sum(len(before) for before in chunks[:rank])
        wanted.append(([first, *[0] * (whole.dim() - 1)], list(chunk.shape), rank))
    described = [
        (part.shard_offsets, part.shard_sizes, part.placement.rank())
        for part in value.metadata().shards_metadata
    ]
    assert described == wanted


def check_scalars_are_refused():
    fsdp = models.libddp_fsdp()
    for wrap in (fsdp.FullyShardedDataParallel, lambda m: fsdp.fully_shard(m, use_dtensor=False)):
        module = torch.nn.Module()
        module.p = torch.nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match="'p' is a scalar"):
            wrap(module)


def check_copies_of_what_is_sharded():
    state = models.shard_plain().state_dict()
    value = state["blocks.0.up.weight"]
    for made in (value.clone(), copy.deepcopy(state)["blocks.0.up.weight"]):
        assert made.to_local().data_ptr() != value.to_local().data_ptr()
        assert torch.equal(made.full_tensor(), value.full_tensor())
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=True)
    again = models.shard_plain(models.build(seed=5))
    again.load_state_dict(loaded)
    found = get_model_state_dict(again, options=WHOLE)
    assert_equal([found], [models.build().state_dict()])


def check_pieces_of_another_division_are_loaded():
    one_unit = models.libddp_fsdp().fully_shard(models.build(seed=5), use_dtensor=False)
    one_unit.load_state_dict(models.shard_plain().state_dict())
    found = get_model_state_dict(one_unit, options=WHOLE)
    assert_equal([found], [models.build().state_dict()])


def check_whole_state_on_rank_0_and_back():
    for build in (models.shard_plain, models.wrap):
        model, optimizer = make(build, steps=2)
        weights = get_model_state_dict(model, options=RANK_0)
        moments = get_optimizer_state_dict(model, optimizer, options=RANK_0)
        assert bool(weights) == bool(moments) == (dist.get_rank() == 0)
        again, other = make(build, seed=5)
        set_model_state_dict(again, weights, options=FROM_RANK_0)
        set_optimizer_state_dict(again, other, moments, options=FROM_RANK_0)
        assert_equal(whole(again, other), whole(model, optimizer))
        models.train(model, 1, lambda _, used=optimizer: used, first=2)
        models.train(again, 1, lambda _, used=other: used, first=2)
        assert_equal(whole(again, other), whole(model, optimizer))


def check_whole_state_on_every_rank():
    model, optimizer = make(models.shard_plain, steps=2)
    weights, moments = whole(model, optimizer)
    again, other = make(models.wrap, seed=5)
    set_model_state_dict(again, weights, options=WHOLE)
    set_optimizer_state_dict(again, other, moments, options=WHOLE)
    assert_equal(whole(again, other), (weights, moments))


def check_flat_optimizer_state():
    for build in (models.shard_plain, models.wrap):
        model, optimizer = make(build, steps=2)
        state = get_optimizer_state_dict(model, optimizer, options=FLAT)
        assert "state.blocks.0.up.weight.exp_avg" in state
        again, other = make(build, seed=5)
        set_optimizer_state_dict(again, other, state, options=FLAT)
        found = get_optimizer_state_dict(again, other, options=WHOLE)
        assert_equal([found], [get_optimizer_state_dict(model, optimizer, options=WHOLE)])


def check_groups_in_another_order():
    def grouped(order):
        model = models.shard_plain()
        parameters = list(model.parameters())
        kinds = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return model, torch.optim.AdamW([kinds[i] for i in order], lr=0.01)

    model, optimizer = grouped((0, 1))
    models.train(model, 2, lambda _: optimizer)
    again, other = grouped((1, 0))
    set_optimizer_state_dict(
        again, other, get_optimizer_state_dict(model, optimizer, options=WHOLE), options=WHOLE
    )
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]
    found = get_optimizer_state_dict(again, other, options=WHOLE)["state"]
    assert_equal([found], [get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]])


def check_whole_optimizer_states_are_copies():
    """Also of what is not cut: kept, they do not change with later steps."""
    for build in (models.shard_plain, models.wrap):
        model = build()
        optimizer = models.adamw(model.parameters())
        models.train(model, 2, lambda _, found=optimizer: found)
        for cpu_offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
            kept = get_optimizer_state_dict(model, optimizer, options=options)
            steps = {name: int(values["step"]) for name, values in kept.get("state", {}).items()}
            models.train(model, 1, lambda _, found=optimizer: found)
            for name, step in steps.items():
                assert kept["state"][name]["step"] == step, name


def check_frozen_parameters_may_be_left_out():
    model = models.build()
    model.embedding.requires_grad_(False)
    model = models.shard_plain(model)
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    assert set(models.TinyGpt().state_dict()) - set(state) == {"embedding.weight", "head.weight"}


def check_models_that_are_not_sharded_go_the_old_way():
    plain = models.TinyGpt()
    state = get_model_state_dict(plain)
    assert all(type(value) is torch.Tensor for value in state.values())


def check_a_mistake_of_one_rank_reaches_all():
    for build in (models.shard_plain, models.wrap):
        model = build()
        state = models.build(seed=5).state_dict()
        if dist.get_rank() == 1:
            del state["norm.bias"]
        with pytest.raises(RuntimeError, match=r"norm\.bias"):
            model.load_state_dict(state)
        state = models.build(seed=5).state_dict()
        state["blocks.0.up.bias"] = torch.ones(3)
        with pytest.raises(RuntimeError, match=r"blocks\.0\..*up\.bias.*\[3\]"):
            model.load_state_dict(state)
        state = models.build(seed=5).state_dict()
        state["extra"] = torch.ones(3)
        with pytest.raises(RuntimeError, match="extra"):
            model.load_state_dict(state)
        models.train(model, 1)


def check_assigning_is_refused_for_whole_tensors_only():
    model = models.shard_plain()
    with pytest.raises(ValueError, match="would replace sharded parameters"):
        model.load_state_dict(models.TinyGpt().state_dict(), assign=True)
    before = list(model.parameters())
    model.load_state_dict(models.shard_plain(models.build(seed=5)).state_dict(), assign=True)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


def check_dtensors_are_loaded():
    from torch.distributed.tensor import distribute_tensor

    model, plain = models.shard_plain(), models.build(seed=5).state_dict()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        key: distribute_tensor(plain[key], mesh, value.placements)
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    assert_equal([get_model_state_dict(model, options=WHOLE)], [plain])


def check_torchs_older_names():
    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    model, optimizer = make(models.wrap, steps=1)
    full = fsdp.full_optim_state_dict(model, optimizer)
    assert bool(full) == (dist.get_rank() == 0)
    again, other = make(models.wrap, seed=5)
    other.load_state_dict(fsdp.scatter_full_optim_state_dict(full, again, optim=other))
    found = fsdp.optim_state_dict(again, other)["state"]
    assert_equal([found], [fsdp.optim_state_dict(model, optimizer)["state"]])
    without = fsdp.scatter_full_optim_state_dict(full, again)  # in the order of the model
    assert_equal([without], [fsdp.scatter_full_optim_state_dict(full, again, optim=other)])


def check_states_of_optimizers_with_other_keys():
    fsdp = models.libddp_fsdp()
    names, numbers = fsdp.OptimStateKeyType.PARAM_NAME, fsdp.OptimStateKeyType.PARAM_ID
    rekey = fsdp.FullyShardedDataParallel.rekey_optim_state_dict
    model, optimizer = make(models.wrap, steps=2)
    full = fsdp.FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = models.build(narrow, seed=5)
    alone = models.adamw(plain.parameters())
    alone.load_state_dict(rekey(full, numbers, plain))
    named = rekey(alone.state_dict(), names, plain, optim=alone)
    assert rekey(named, names, plain) is named
    assert_equal([named["state"]], [full["state"]])
    for load in ("shard_full_optim_state_dict", "flatten_sharded_optim_state_dict"):
        again, other = make(models.wrap, seed=5)
        state = named
        if load == "flatten_sharded_optim_state_dict":
            state = fsdp.FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
        other.load_state_dict(
            getattr(fsdp.FullyShardedDataParallel, load)(state, again, optim=other)
        )
        found = fsdp.FullyShardedDataParallel.optim_state_dict(again, other)
        assert_equal([found["state"]], [full["state"]])
    with pytest.raises(ValueError, match=r"'embedding\.weight', which is no parameter of Linear"):
        rekey(full, numbers, torch.nn.Linear(2, 2))
    shard = fsdp.FullyShardedDataParallel.shard_full_optim_state_dict
    assert_equal([shard(full, again)], [shard(full, again, optim=other)])


class WholeChunks(dcp.FileSystemReader):
    """Like readers of checkpoints in memory, which give what was saved and cut nothing."""

    def read_data(self, plan, planner):
        metadata = self.read_metadata().state_dict_metadata
        for item in plan.items:
            chunks = getattr(metadata[item.storage_index.fqn], "chunks", None)
            if chunks is not None:
                sizes = {tuple(chunk.offsets): chunk.sizes for chunk in chunks}
                assert item.lengths == sizes[tuple(item.storage_index.offset)]
                assert not any(item.storage_offsets)
        return super().read_data(plan, planner)


def check_torchs_older_loading_of_optimizers():
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

    fsdp, folder = models.libddp_fsdp(), checks.shared_folder()
    model, optimizer = make(models.wrap, steps=2)
    again, other = make(models.wrap, seed=5)
    for each in (model, again):
        fsdp.FullyShardedDataParallel.set_state_dict_type(
            each, fsdp.StateDictType.SHARDED_STATE_DICT
        )
    state = fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    weights = again.state_dict()
    dcp.load({"model": weights}, storage_reader=WholeChunks(folder))
    again.load_state_dict(weights)
    loaded = load_sharded_optimizer_state_dict(
        weights, optimizer_key="optimizer", storage_reader=WholeChunks(folder)
    )
    other.load_state_dict(
        fsdp.FullyShardedDataParallel.optim_state_dict_to_load(again, other, loaded["optimizer"])
    )
    assert_equal(whole(again, other), whole(model, optimizer))


def check_a_rank_without_a_row_goes_to_the_cpu():
    fsdp = models.libddp_fsdp()
    model = fsdp.FullyShardedDataParallel(torch.nn.Linear(4, 1))
    config = fsdp.ShardedStateDictConfig(offload_to_cpu=True)
    kind = fsdp.StateDictType.SHARDED_STATE_DICT
    with fsdp.FullyShardedDataParallel.state_dict_type(model, kind, config):
        state = model.state_dict()
    mine = [shard.tensor for value in state.values() for shard in value.local_shards()]
    assert len(mine) == (2 if dist.get_rank() == 0 else 0)


def check_a_rank_without_a_row_saves_and_loads():
    fsdp, folder = models.libddp_fsdp(), checks.shared_folder()
    model, again = (fsdp.FullyShardedDataParallel(torch.nn.Linear(4, 1)) for _ in range(2))
    wanted = get_model_state_dict(model, options=WHOLE)
    with fsdp.FullyShardedDataParallel.state_dict_type(
        model, fsdp.StateDictType.SHARDED_STATE_DICT
    ):
        dcp.save(model.state_dict(), checkpoint_id=folder)
    with fsdp.FullyShardedDataParallel.state_dict_type(
        again, fsdp.StateDictType.SHARDED_STATE_DICT
    ):
        state = again.state_dict()
        assert all(value.device.type == "cpu" for value in state.values())
        dcp.load(state, checkpoint_id=folder)
        again.load_state_dict(state)
    assert_equal([get_model_state_dict(again, options=WHOLE)], [wanted])


def check_asynchronous_saving():
    folder = checks.shared_folder()
    model = models.shard_plain()
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder).result()
    again = models.shard_plain(models.build(seed=5))
    state = again.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    assert_equal([get_model_state_dict(again, options=WHOLE)], [models.build().state_dict()])


results, test_on_two_ranks = checks.suite(globals(), 2)
