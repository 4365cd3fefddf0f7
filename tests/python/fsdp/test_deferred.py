"""Modules on the meta device, which get their values later, with parameters as plain tensors."""

import ctypes
from pathlib import Path

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from fsdp_states import assert_equal, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


def reset_parameters(model, seed):
    torch.manual_seed(seed)
    return model.apply(models.reset)


def initialised(seed=17):
    """As a script of torch's FSDP2 does it."""
    model = models.shard_plain(models.on_meta())
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    return reset_parameters(model, seed)


def values(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def check_values_are_those_of_an_ordinary_model():
    plain = reset_parameters(models.TinyGpt(), 17)
    model = initialised()
    assert model.head.weight is model.embedding.weight
    assert_equal([values(model)], [plain.state_dict()])
    numel = sum(p.numel() for p in model.parameters())
    assert numel < 0.6 * sum(p.numel() for p in plain.parameters())
    assert models.train(model, 3) == models.train(models.shard_plain(plain), 3)


def check_every_rank_has_its_rows_of_its_own_values():
    model = initialised(seed=dist.get_rank())
    name = "blocks.0.up.weight"
    mine = model.state_dict()[name].to_local()
    wanted = reset_parameters(models.TinyGpt(), dist.get_rank()).state_dict()[name]
    torch.testing.assert_close(mine, wanted.chunk(dist.get_world_size())[dist.get_rank()])


def check_training_equals_torchs():
    def fill(module):  # drawn by torch's DTensors in another order
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.03 * parameter.shape[0])

    theirs = models.theirs(models.on_meta())
    ours = models.shard_plain(models.on_meta())
    for model in (ours, theirs):
        model.to_empty(device="cpu")
        model.apply(fill)
    assert models.train(ours, 4) == pytest.approx(models.train(theirs, 4), rel=1e-5)
    found = values(ours)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(found[name], value.full_tensor(), rtol=1e-4, atol=1e-5)


def check_an_optimizer_from_before_there_were_values():
    model = models.shard_plain(models.on_meta())
    model.norm.weight.is_special = True
    optimizer = models.adamw(model.parameters())
    reset_parameters(model.to_empty(device="cpu"), 17)
    assert model.norm.weight.is_special
    losses = models.train(model, 3, lambda _: optimizer)
    assert losses == models.train(initialised(), 3)


def check_only_blocks_are_sharded():
    model = models.on_meta()
    for block in model.blocks:
        models.libddp_fsdp().fully_shard(block, use_dtensor=False)
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight  # the rest is an ordinary module
    reset_parameters(model, 17)
    plain = reset_parameters(models.TinyGpt(), 17)
    torch.testing.assert_close(model(models.tokens(0)), plain(models.tokens(0)))


def check_states_instead_of_an_initialisation():
    source = reset_parameters(models.TinyGpt(), 5)
    wanted, is_first = source.state_dict(), dist.get_rank() == 0
    whole_state = StateDictOptions(full_state_dict=True)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sharded = models.shard_plain(source).state_dict()
    for load in (
        lambda m: set_model_state_dict(m, wanted, options=whole_state),
        lambda m: set_model_state_dict(m, wanted if is_first else {}, options=from_first),
        lambda m: set_model_state_dict(m, sharded),
        lambda m: m.load_state_dict(wanted, assign=True),
        lambda m: m.load_state_dict(sharded, assign=True),
    ):
        model = models.shard_plain(models.on_meta())
        load(model)
        assert_equal([values(model)], [wanted])
        models.train(model, 1)


def check_distributed_tensors_made_for_the_entries():
    from torch.distributed.tensor import distribute_tensor

    wanted = models.build(seed=5).state_dict()
    model = models.shard_plain(models.on_meta())
    state = {}
    for name, entry in model.state_dict().items():
        assert entry.is_meta
        assert entry.size() == wanted[name].shape == entry.full_tensor().shape
        tensor = distribute_tensor(wanted[name], entry.device_mesh, entry.placements)
        state[name] = nn.Parameter(tensor)
    model.load_state_dict(state, strict=False, assign=True)
    assert_equal([values(model)], [wanted])


def check_checkpoints():
    import torch.distributed.checkpoint as dcp

    fsdp, folder = models.libddp_fsdp(), checks.shared_folder()
    source = models.shard_plain(models.build(seed=5))
    optimizer = models.adamw(source.parameters())
    models.train(source, 1, lambda _: optimizer)
    fsdp.save_snapshot(folder / "snapshot", source, optimizer)
    dcp.save({"model": source.state_dict()}, checkpoint_id=folder / "dcp")
    model = models.shard_plain(models.on_meta())
    other = models.adamw(model.parameters())
    fsdp.load_snapshot(folder / "snapshot", model, other)
    assert_equal(whole(model, other), whole(source, optimizer))
    again = models.shard_plain(models.on_meta()).to_empty(device="cpu")
    state = again.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder / "dcp")
    assert_equal([values(again)], [values(source)])


def peak_mib(function):
    """By how much the process grew while it ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = peak()
    function()
    return (peak() - before) / 1024


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def sharded_layers():
    """12 units of 4 MiB on the meta device, or 48 MiB in all."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    for layer in layers:
        models.libddp_fsdp().fully_shard(layer, use_dtensor=False)
    return models.libddp_fsdp().fully_shard(layers, use_dtensor=False)


def check_loading_takes_the_memory_of_a_unit():
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is seen to be free
    source = sharded_layers().to_empty(device="cpu")
    whole_model = peak_mib(lambda: reset_parameters(source, 17))
    state = source.state_dict()
    small = models.shard_plain()
    set_model_state_dict(small, small.state_dict())  # imports, and whatever is made once
    model = sharded_layers()
    loaded = peak_mib(lambda: set_model_state_dict(model, state))
    assert whole_model > 40
    assert loaded < 44, loaded  # its half and a few tensors, not its half and the whole
    assert torch.equal(model.state_dict()["7.weight"].to_local(), state["7.weight"].to_local())


class Counting(nn.Module):
    """With buffers, one of which state dicts leave out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", torch.full((2,), 3.0))
        self.register_buffer("made", torch.ones(2), persistent=False)


def check_buffers():
    fsdp = models.libddp_fsdp()
    model = fsdp.fully_shard(models.on_meta(Counting), use_dtensor=False)
    model.load_state_dict(Counting().state_dict())
    assert model.kept.tolist() == [3.0, 3.0]
    assert model.made.is_meta  # as with torch, for scripts to make anew
    model = fsdp.fully_shard(models.on_meta(Counting), use_dtensor=False).to_empty(device="cpu")
    assert not model.kept.is_meta
    assert not model.made.is_meta


def check_mistakes():
    model = models.shard_plain(models.on_meta())
    with pytest.raises(ValueError, match=r"is on device meta.*Hint: .*to_empty"):
        model(models.tokens(0))
    model.to_empty(device="cpu", recurse=False)
    with pytest.raises(ValueError, match=r"is on device meta.*Hint: .*to_empty"):
        model(models.tokens(0))
    reset_parameters(model.to_empty(device="cpu"), 17)
    models.train(model, 1)
    state = models.build().state_dict()
    del state["norm.bias"]
    with pytest.raises(ValueError, match=r"has no 'norm.bias'; the model was on the meta device"):
        models.shard_plain(models.on_meta()).load_state_dict(state, strict=False)
    with pytest.raises(ValueError, match=r"has no 'norm.bias'; the model was on the meta device"):
        set_model_state_dict(
            models.shard_plain(models.on_meta()), state, options=StateDictOptions(strict=False)
        )
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.bias"):
        models.shard_plain(models.on_meta()).load_state_dict(state)
    with pytest.raises(ValueError, match="would replace sharded parameters"):
        models.shard_plain().load_state_dict(models.build().state_dict(), assign=True)


def check_one_rank_has_values():
    model = models.build() if dist.get_rank() == 0 else models.on_meta()
    with pytest.raises(ValueError, match=r"rank 1.*is on device meta|is on device meta"):
        models.shard_plain(model)
    models.train(initialised(), 1)


results, test_on_all_ranks = checks.suite(globals(), 2)
