"""Meta devices, state dicts and checkpoints where parameters are DTensors, beside torch's FSDP2."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_states import FROM_RANK_0, RANK_0, WHOLE, assert_equal, make, narrow, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


def initialised(wrap):
    """As a script of torch's FSDP2 does it; each rank draws its rows."""
    model = wrap(models.on_meta())
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(17)
    return model.apply(models.reset)


def values(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def check_initial_values_are_torchs():
    ours, theirs = initialised(models.shard), initialised(models.theirs)
    assert ours.head.weight is ours.embedding.weight
    assert_equal([values(ours)], [values(theirs)])
    assert models.train(ours, 3) == models.train(theirs, 3)
    assert_equal([values(ours)], [values(theirs)])


def check_an_optimizer_from_before_there_were_values():
    def losses(wrap):
        model = wrap(models.on_meta())
        optimizer = models.adamw(model.parameters())
        torch.manual_seed(17)
        model.to_empty(device="cpu").apply(models.reset)
        return models.train(model, 3, lambda _: optimizer)

    assert losses(models.shard) == losses(models.theirs)


def check_states_instead_of_an_initialisation():
    source = models.build(seed=5)
    wanted = {name: value.clone() for name, value in source.state_dict().items()}
    is_first = dist.get_rank() == 0
    sharded = models.shard(source).state_dict()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def distributed(model):
        return {
            name: nn.Parameter(distribute_tensor(wanted[name], mesh, entry.placements))
            for name, entry in model.state_dict().items()
        }

    from_first = dict(wanted) if is_first else {}
    for load in (
        lambda m: set_model_state_dict(m, dict(wanted), options=WHOLE),
        lambda m: set_model_state_dict(m, dict(from_first), options=FROM_RANK_0),
        lambda m: set_model_state_dict(m, sharded),
        lambda m: m.load_state_dict(wanted, assign=True),
        lambda m: m.load_state_dict(sharded, assign=True),
        lambda m: m.load_state_dict(distributed(m), strict=False, assign=True),
    ):
        model = models.shard(models.on_meta())
        load(model)
        assert_equal([values(model)], [wanted])
        models.train(model, 1)


def check_the_states_torchs_functions_give():
    ours, optimizer = make(models.shard, steps=2)
    theirs = models.theirs(models.build(narrow))
    other = models.adamw(theirs.parameters())
    models.train(theirs, 2, lambda _: other)
    found, wanted = get_model_state_dict(ours), get_model_state_dict(theirs)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert isinstance(found[name], DTensor)
        assert torch.equal(found[name].to_local(), value.to_local())
    found = get_optimizer_state_dict(ours, optimizer)["state"]
    wanted = get_optimizer_state_dict(theirs, other)["state"]
    assert list(found) == list(wanted)
    for name, entries in wanted.items():
        for key, value in entries.items():
            assert isinstance(found[name][key], DTensor) == isinstance(value, DTensor)
            mine, other_value = found[name][key], value
            if isinstance(value, DTensor):
                mine, other_value = mine.to_local(), value.to_local()
            torch.testing.assert_close(mine, other_value)


def check_states_on_rank_0_and_back():
    def run(wrap):
        model, optimizer = make(wrap, steps=2)
        weights = get_model_state_dict(model, options=RANK_0)
        moments = get_optimizer_state_dict(model, optimizer, options=RANK_0)
        assert bool(weights) == bool(moments) == (dist.get_rank() == 0)
        again, other = make(wrap, seed=5)
        set_model_state_dict(again, weights, options=FROM_RANK_0)
        set_optimizer_state_dict(again, other, moments, options=FROM_RANK_0)
        assert_equal([values(again)], [values(model)])
        models.train(again, 2, lambda _: other, first=2)
        return values(again)

    assert_equal([run(models.shard)], [run(models.theirs)])


def check_checkpoints():
    folder = checks.shared_folder()
    model, optimizer = make(models.shard, steps=2)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder / "dcp")
    dcp.async_save(state, checkpoint_id=folder / "async").result()
    fsdp = models.libddp_fsdp()
    fsdp.save_snapshot(folder / "snapshot", model, optimizer)

    def from_dcp(name):
        def load(model, optimizer):
            state = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(state, checkpoint_id=folder / name)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])

        return load

    for load in (
        from_dcp("dcp"),
        from_dcp("async"),
        lambda m, o: fsdp.load_snapshot(folder / "snapshot", m, o),
    ):
        for wrap in (models.shard, models.shard_plain, models.wrap):
            again, other = make(wrap, seed=5)
            load(again, other)
            assert_equal(whole(again, other)[:1], whole(model, optimizer)[:1])
            losses = models.train(again, 1, lambda _, used=other: used, first=2)
            straight, used = make(models.shard, steps=2)
            assert losses == models.train(straight, 1, lambda _, used=used: used, first=2)


class Renamed(nn.Linear):
    """Its state dict has another name for the weight than the module."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module, state, prefix, metadata):
        state[prefix + "matrix"] = state.pop(prefix + "weight")

    @staticmethod
    def _load(module, state, prefix, *others):
        state[prefix + "weight"] = state.pop(prefix + "matrix")


def check_hooks_that_make_parameters_of_other_entries():
    model, again = (nn.Sequential(Renamed()) for _ in range(2))
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    for each in (model, again):
        models.libddp_fsdp().fully_shard(each)
    again.load_state_dict(model.state_dict())
    for parameter, value in zip(again.parameters(), wanted, strict=True):
        assert torch.equal(parameter.full_tensor(), value)


class Own(nn.Linear):
    def load_state_dict(self, state_dict, **options):
        return super().load_state_dict(state_dict, **options)


class Noisy(nn.Linear):
    def load_state_dict(self, state_dict, strict=True, assign=False, *, notes=()):
        self.notes = notes
        return super().load_state_dict(state_dict, strict, assign)


def check_modules_with_a_load_state_dict_of_their_own():
    own, noisy = (models.libddp_fsdp().fully_shard(kind(4, 4)) for kind in (Own, Noisy))
    own.load_state_dict(own.state_dict())
    noisy.load_state_dict(own.state_dict(), False, notes=[3])
    assert noisy.notes == [3]
    assert torch.equal(noisy.weight.full_tensor(), own.weight.full_tensor())
    state = own.state_dict()
    del state["bias"]
    assert own.load_state_dict(state, strict=False).missing_keys == ["bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        own.load_state_dict(state)


def check_a_state_between_unshard_and_reshard():
    wanted = models.build(seed=5).state_dict()
    model = models.shard(models.build(seed=5))
    outer = nn.ModuleDict({"inner": model})
    for take in (
        lambda: model.state_dict(),
        lambda: get_model_state_dict(model),
        lambda: {n.removeprefix("inner."): v for n, v in outer.state_dict().items()},
        lambda: {f"norm.{n}": v for n, v in model.norm.state_dict().items()},
    ):
        for unit in (model, *model.blocks):
            unit.unshard()
        assert not isinstance(model.norm.weight, DTensor)
        state = take()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert_equal(
            [{name: value.full_tensor() for name, value in state.items()}],
            [{name: wanted[name] for name in state}],
        )
        for unit in (model, *model.blocks):
            unit.reshard()
    other = models.build(seed=6).state_dict()
    sharded = models.shard(models.build(seed=6)).state_dict()
    for load in (
        lambda: model.load_state_dict(other),
        lambda: outer.load_state_dict({f"inner.{n}": v for n, v in sharded.items()}),
    ):
        model.load_state_dict(wanted)
        model.unshard()
        load()
        assert_equal([values(model)], [models.build(seed=6).state_dict()])
    models.train(model, 1)


def check_a_rank_loads_its_own_part_alone():
    """As with torch; of a replica of several ranks that recovers, torchft loads them one by one."""

    def losses(wrap):
        model, optimizer = make(wrap, steps=1)
        source, _ = make(wrap, seed=6)
        if dist.get_rank() == 1:
            model.load_state_dict(source.state_dict())
            set_model_state_dict(model, get_model_state_dict(source))
            loaded = model.load_state_dict({"norm.weight": source.norm.weight}, strict=False)
            assert "norm.weight" not in loaded.missing_keys
            with pytest.raises(RuntimeError, match=r"Missing key.*norm\.bias"):
                model.load_state_dict({"norm.weight": source.norm.weight})
        return models.train(model, 2, lambda _: optimizer, first=1)

    assert losses(models.shard) == losses(models.theirs)


def check_a_rank_that_loads_whole_tensors_alone_is_told():
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # a group that may fail
    model = models.libddp_fsdp().fully_shard(nn.Linear(4, 4), mesh=mesh)
    whole = nn.Linear(4, 4).state_dict()
    step = (lambda _: model.load_state_dict(whole)) if dist.get_rank() == 0 else model
    with pytest.raises(RuntimeError, match="different collectives"):
        step(torch.ones(2, 4))


def check_pieces_of_a_state_one_by_one():
    wanted = models.build(seed=5).state_dict()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for is_distributed in (False, True):
        model = models.shard(models.on_meta())
        optimizer = models.adamw(model.parameters())
        for name, parameter in list(model.named_parameters()):
            with pytest.raises(ValueError, match="is on device meta"):
                model(models.tokens(0))
            piece = wanted[name]
            if is_distributed:
                piece = distribute_tensor(piece, mesh, parameter.placements)
            result = model.load_state_dict({name: piece}, strict=False, assign=True)
            assert name not in result.missing_keys
            assert not result.unexpected_keys
        assert model.head.weight is model.embedding.weight
        assert_equal([values(model)], [wanted])
        assert models.train(model, 2, lambda _, o=optimizer: o) == models.train(
            models.shard(models.build(seed=5)), 2
        )


def check_a_piece_of_another_shape_changes_nothing():
    model = models.shard(models.on_meta())
    pieces = {"norm.bias": torch.ones(12), "norm.weight": torch.ones(12 + dist.get_rank())}
    with pytest.raises(ValueError, match=r"'norm\.weight' has the shape \[13\]"):
        model.load_state_dict(pieces, strict=False, assign=True)
    assert all(p.is_meta for p in model.parameters())


def check_a_refused_state_leaves_the_model_without_values():
    def without(state):
        del state["norm.bias"]

    def of_another_shape(state):
        state["norm.bias"] = torch.ones(3)

    for shard in (models.shard, models.shard_plain):
        model = shard(models.on_meta())
        for change, strict in ((without, True), (without, False), (of_another_shape, True)):
            state = models.build().state_dict()
            if dist.get_rank() == 1:
                change(state)
            with pytest.raises(RuntimeError, match=r"norm\.bias"):
                model.load_state_dict(state, strict=strict)
            if shard is models.shard_plain:
                change(state) if dist.get_rank() == 0 else None
                with pytest.raises(RuntimeError, match=r"norm\.bias"):
                    set_model_state_dict(model, state, options=StateDictOptions(strict=strict))
            assert all(p.is_meta for p in model.parameters())
        model.load_state_dict(models.build().state_dict())
        models.train(model, 1)


def check_mistakes():
    model = models.shard(models.on_meta())
    with pytest.raises(ValueError, match=r"is on device meta.*Hint: .*to_empty"):
        model(models.tokens(0))
    state = models.build().state_dict()
    del state["norm.bias"]
    with pytest.raises(ValueError, match=r"has no 'norm.bias'; the model was on the meta device"):
        models.shard(models.on_meta()).load_state_dict(state, strict=False)
    for change in (lambda s: s.pop("norm.bias"), lambda s: s.update(extra=torch.ones(3))):
        state = models.build().state_dict()
        if dist.get_rank() == 1:
            change(state)
        with pytest.raises(RuntimeError, match=r"norm\.bias|extra"):
            models.shard().load_state_dict(state)
    state = models.build().state_dict()
    state["norm.bias"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"norm\.bias.*\[3\]"):
        models.shard().load_state_dict(state)


results, test_on_all_ranks = checks.suite(globals(), 2)
