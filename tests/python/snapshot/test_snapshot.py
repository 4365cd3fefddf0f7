"""libddp.Snapshot: models of every kind, taken up by other ranks and other wrappers."""

import json
import os
import re
import time
from pathlib import Path

import ddp_models
import fsdp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
from fsdp_states import assert_equal, narrow, whole
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

#: Seconds: a keeper outlives the ranks of one link of a chain, and not the tests.
LINGER = 45.0


def ddp(model):
    return ddp_models.libddp_ddp()(model)


def zero1(model):
    return ddp(model)


def make(kind, seed, steps=0):
    """A model and an optimizer, trained for some steps."""
    from libddp.optim import AdamW

    wrap = {"ddp": ddp, "zero1": zero1}.get(kind) or getattr(models, kind)
    model = wrap(models.build(narrow, seed))
    if kind == "zero1":
        optimizer = AdamW(model.parameters(), lr=0.01, shard_over=model)
    else:
        optimizer = models.adamw(model.parameters())
    models.train(model, steps, lambda _: optimizer)
    return model, optimizer


def state_of(kind, model, optimizer):
    if kind in ("ddp", "zero1"):
        return get_state_dict(model.module, optimizer, options=StateDictOptions())
    return whole(model, optimizer)


def save_and_load(folder, step, kind, storage):
    """One link of a chain: takes up what the last number of ranks has left."""
    from libddp.distributed import destroy_process_group, init_process_group

    import libddp

    init_process_group("libddp")
    folder = Path(folder)
    model, optimizer = make(kind, seed=17 + step, steps=2 if step == 0 else 0)
    snapshot = libddp.Snapshot(folder / "run", linger=LINGER)
    extra = snapshot.load(model, optimizer)
    if step == 0:
        assert extra == {}
    else:
        assert extra["step"] == step - 1
        wanted = torch.load(folder / f"{step - 1}.pt", weights_only=True)
        assert_equal(state_of(kind, model, optimizer), wanted)
        models.train(model, 1, lambda _: optimizer, first=step)
    report = snapshot.save(step, model, optimizer, extra={"step": step}, storage=storage)
    assert report.step == step
    assert report.is_stored == storage
    if storage:
        snapshot.wait(60)
        snapshot.close()
    state = state_of(kind, model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, folder / f"{step}.pt")
    destroy_process_group()


CHAIN = [
    (1, "ddp"),
    (3, "ddp"),
    (2, "shard"),
    (4, "wrap_hybrid"),
    (3, "wrap"),
    (2, "zero1"),
    (4, "shard"),
    (1, "wrap"),
]


@pytest.mark.parametrize("storage", [False, True], ids=["memory", "folder"])
def test_any_number_of_ranks_in_any_wrapper(tmp_path, storage):
    for step, (world, kind) in enumerate(CHAIN):
        ranks.run(save_and_load, world, str(tmp_path), step, kind, storage)
    if storage:
        names = sorted(path.name for path in (tmp_path / "run").iterdir())
        assert names == ["run", "step-6.7", "step-7.8"]


class Noisy(torch.nn.Module):
    """Dropout, running statistics, and a value that is no tensor."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)
        )
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.layers(x)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def repeated_steps():
    """Steps after a load draw the same numbers and have the same losses, to the bit."""
    import random

    from libddp.distributed import destroy_process_group, init_process_group

    import libddp

    init_process_group("libddp")
    torch.manual_seed(5 + dist.get_rank())
    random.seed(dist.get_rank())
    name = [torch.randint(2**40, ()).item()]
    dist.broadcast_object_list(name)
    run = f"test-{name[0]}"

    def build():
        model = ddp(Noisy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(model, optimizer, scheduler):
        loss = model(torch.randn(4, 6) + random.random()).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item(), scheduler.get_last_lr()

    snapshot = libddp.Snapshot(run=run, linger=LINGER)
    parts = build()
    step(*parts)
    snapshot.save(1, *parts[:2], scheduler=parts[2])
    wanted = [step(*parts) for _ in range(4)]
    parts = build()
    other = libddp.Snapshot(run=run, linger=LINGER)
    assert other.load(*parts[:2], scheduler=parts[2]) == {}
    assert parts[0].module.count == 1
    assert [step(*parts) for _ in range(4)] == wanted
    dist.barrier()
    other.close()
    snapshot.close()
    destroy_process_group()


def test_repeated_steps_are_those_that_were_lost():
    ranks.run(repeated_steps, 2)


def states_in_different_orders(run):
    """Ranks of one host share the copying; one has loaded its optimizer, the other has not."""
    from libddp.distributed import destroy_process_group, init_process_group

    import libddp

    init_process_group("libddp")
    model, optimizer = make("ddp", 3, steps=2)
    if dist.get_rank() == 1:
        loaded = optimizer.state_dict()
        state = {
            number: dict(sorted(entries.items())) for number, entries in loaded["state"].items()
        }
        optimizer.load_state_dict({**loaded, "state": state})
    with libddp.Snapshot(run=run, linger=LINGER) as snapshot:
        snapshot.save(1, model, optimizer)
        wanted = state_of("ddp", model, optimizer)
        model, optimizer = make("ddp", 4)
        snapshot.load(model, optimizer)
        assert_equal(state_of("ddp", model, optimizer), wanted)
        dist.barrier()
    destroy_process_group()


def test_states_may_stand_in_different_orders():
    ranks.run(states_in_different_orders, 2, f"orders-{os.getpid()}")


def moments_that_are_not_the_saves(run):
    """Of sharded models: those of later steps, of other rows, none where gradients are there."""
    from libddp.distributed import destroy_process_group, init_process_group

    import libddp

    init_process_group("libddp")
    for kind in ("wrap", "shard"):
        with libddp.Snapshot(run=f"{run}-{kind}", random=False, linger=LINGER) as snapshot:
            model, optimizer = make(kind, 3)
            snapshot.save(0, model, optimizer)
            models.train(model, 2, lambda _, own=optimizer: own)
            snapshot.load(model, optimizer)
            assert not optimizer.state
            models.train(model, 2, lambda _, own=optimizer: own)
            snapshot.save(2, model, optimizer)
            wanted = whole(model, optimizer)
            for entries in optimizer.state.values():
                entries["exp_avg"] = torch.full((1, *entries["exp_avg"].shape), 7.0)
            snapshot.load(model, optimizer)
            assert_equal(whole(model, optimizer), wanted)
            optimizer.state.clear()
            loss = model(models.tokens(0))[1]
            loss.backward()
            gradients = [p.grad for p in model.parameters()]
            snapshot.load(model, optimizer)
            assert [id(p.grad) for p in model.parameters()] == [id(g) for g in gradients]
            assert_equal(whole(model, optimizer), wanted)
            dist.barrier()
    destroy_process_group()


def test_moments_of_a_sharded_model_are_those_of_the_save():
    ranks.run(moments_that_are_not_the_saves, 2, f"moments-{os.getpid()}")


@pytest.fixture
def snapshot(tmp_path):
    import libddp

    with libddp.Snapshot(tmp_path / "run", linger=LINGER) as made:
        yield made


def parts(width=4):
    model = torch.nn.Linear(3, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_dict_comes_back_as_it_was(snapshot):
    import numpy

    shared = torch.arange(6.0).view(2, 3)
    state = {
        "w": shared,
        "again": shared,
        3: [1, 2.5, None, True, "x", float("inf"), 2**70, -0.0],
        ("a", 1): {"$odd": (1, {2, 3}, b"\0\xff", 1 + 2j)},
        "types": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
        "arrays": [numpy.arange(4), numpy.float32(1.5), numpy.zeros((0, 2))],
        "small": [torch.tensor(7), torch.empty(0, 3), torch.ones(2, dtype=torch.float8_e5m2)],
        "strided": torch.arange(12).view(3, 4).t(),
        "": {"/../": {}},
    }
    snapshot.save(-5, state=state)
    found = snapshot.load()
    assert found["w"] is found["again"]
    assert found.keys() == state.keys()
    assert found[3] == state[3]
    assert found["a", 1] == state["a", 1]
    assert found["types"] == state["types"]
    assert found[""] == state[""]
    for one, other in zip(found["arrays"], state["arrays"], strict=True):
        assert numpy.array_equal(one, other)
        assert one.dtype == other.dtype
    for one, other in zip(
        [found["w"], found["strided"], *found["small"][:2]],
        [shared, state["strided"], *state["small"][:2]],
        strict=True,
    ):
        assert torch.equal(one, other)
    assert torch.equal(found["small"][2].view(torch.uint8), state["small"][2].view(torch.uint8))
    found["w"].zero_()
    assert torch.equal(snapshot.load()["w"], shared), "what is loaded is no part of the snapshot"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "extra['a'] is a builtins.object"),
        (lambda: 1, "builtins.function"),
        (torch.zeros(2).to_sparse(), "is a torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "without memory (meta)"),
    ],
)
def test_what_cannot_be_kept_is_named(snapshot, value, text):
    import libddp

    snapshot.save(1, extra={"step": 1})
    with pytest.raises(libddp.ArgumentError, match="libddp snapshot") as caught:
        snapshot.save(2, extra={"a": value})
    assert text in str(caught.value)
    assert snapshot.load() == {"step": 1}


def test_deep_values_are_refused(snapshot):
    import libddp

    deep = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(libddp.ArgumentError, match="nested deeper than 24 levels"):
        snapshot.save(1, extra=deep)


def test_another_model_or_optimizer_is_refused(snapshot):
    import libddp

    model, optimizer = parts()
    snapshot.save(1, model, optimizer)
    before = model.weight.clone()
    told = r"memory, step 1: 'model.weight' was stored as F32 \[4, 3\], .* Hint: load into"
    with pytest.raises(libddp.ArgumentError, match=told):
        snapshot.load(*parts(5))
    with pytest.raises(libddp.ArgumentError, match=r"has '(bias|weight)', which"):
        snapshot.load(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    with torch.no_grad():
        before = model.weight.add_(1).clone()
    with pytest.raises(libddp.ArgumentError, match="memory, step 1 has no 'scaler'"):
        snapshot.load(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    assert torch.equal(model.weight, before), "something was loaded before that was known"
    snapshot.save(2, model)
    with pytest.raises(libddp.ArgumentError, match="has no optimizer"):
        snapshot.load(model, optimizer)
    snapshot.save(3, state={"a": 1})
    with pytest.raises(libddp.ArgumentError, match="has a state and no model"):
        snapshot.load(model)
    assert snapshot.load() == {"a": 1}


def test_a_save_of_another_model_behind_a_damaged_one_is_a_reason_more(tmp_path, caplog):
    """As C++ programs have it: tests/snapshot/snapshot_test.cpp."""
    import libddp

    small, large = torch.nn.Linear(1, 4, bias=False), torch.nn.Linear(1, 5, bias=False)
    with libddp.Snapshot(tmp_path / "run", linger=LINGER) as snapshot:
        for step, model in ((1, small), (2, large)):
            snapshot.save(step, model, storage=True)
            snapshot.wait(60)
    wanted, before = torch.nn.Linear(1, 4, bias=False), small.weight.clone()
    with libddp.Snapshot(tmp_path / "run", linger=LINGER) as snapshot:
        first = wanted.weight.clone()
        told = r"step-2\.2: 'model.weight' was stored as F32 \[5, 1\], here it is F32 \[4, 1\]"
        with pytest.raises(libddp.ArgumentError, match=told):
            snapshot.load(wanted)
        assert torch.equal(wanted.weight, first)
        os.truncate(tmp_path / "run/step-2.2/rank-0-of-1.safetensors", 30)
        snapshot.load(wanted)
        assert torch.equal(wanted.weight, before)
        assert re.search(r"passed over: .*step-2\.2/", caplog.text)
        went_on = r"goes on from .*step-1\.1: one save that is newer could not be loaded"
        assert re.search(went_on, caplog.text)
        with pytest.raises(
            libddp.SnapshotError, match="none of the saves that are there"
        ) as caught:
            snapshot.load(torch.nn.Linear(1, 5, bias=False))
    told = str(caught.value)
    assert "Hint: `libddp snapshot verify FOLDER`" in told
    assert "step-2.2" in told
    assert "step-1.1: 'model.weight' was stored as F32 [4, 1], here it is F32 [5, 1]" in told


def test_wrong_arguments(tmp_path):
    import libddp

    with pytest.raises(libddp.ArgumentError, match="nosuch://bucket/run"):
        libddp.Snapshot("nosuch://bucket/run")
    with pytest.raises(libddp.ArgumentError, match="the folder is ''"):
        libddp.Snapshot("")
    with pytest.raises(libddp.ArgumentError, match="no name of a run"):
        libddp.Snapshot(run="a b")
    (tmp_path / "file").write_text("")
    snapshot = libddp.Snapshot(tmp_path / "file")
    with pytest.raises(libddp.SnapshotError, match="it is no folder"):
        snapshot.save(1, state={})
    with libddp.Snapshot(linger=LINGER) as memory:
        with pytest.raises(libddp.ArgumentError, match="it has no folder"):
            memory.save(1, state={}, storage=True)
        with pytest.raises(libddp.ArgumentError, match="a model or a state, not both"):
            memory.save(1, torch.nn.Linear(1, 1), state={})
        with pytest.raises(libddp.ArgumentError, match="no state_dict and load_state_dict"):
            memory.save(1, sampler=3)
    with pytest.raises(libddp.StateError, match="it is closed"):
        memory.save(1, state={})


def test_what_is_loaded_is_trained_on_and_the_snapshot_stays(snapshot):
    """torch's load_state_dict keeps the tensors that it is given: they must not be the memory."""
    model, optimizer = parts()
    snapshot.save(1, model, optimizer)
    wanted = {k: v.clone() for k, v in optimizer.state[model.weight].items()}
    fresh = torch.nn.Linear(3, 4)
    other = torch.optim.AdamW(fresh.parameters())
    snapshot.load(fresh, other)
    for _ in range(3):
        fresh(torch.ones(3)).sum().backward()
        other.step()
    again = torch.nn.Linear(3, 4)
    third = torch.optim.AdamW(again.parameters())
    snapshot.load(again, third)
    for key, value in third.state[again.weight].items():
        assert torch.equal(value, wanted[key])


def test_in_place_where_the_state_is_there(snapshot):
    model, optimizer = parts()
    snapshot.save(1, model, optimizer)
    moment = optimizer.state[model.weight]["exp_avg"]
    place, wanted = moment.data_ptr(), moment.clone()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    snapshot.load(model, optimizer)
    assert optimizer.state[model.weight]["exp_avg"].data_ptr() == place
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], wanted)


def test_compiled_and_tied_models(snapshot):
    def build():
        model = ddp_models.TiedLanguageModel()
        return torch.compile(model, backend="eager")

    model = build()
    snapshot.save(1, model)
    other = build()
    snapshot.load(other)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert other.head.weight is other.embedding.weight
    plain = ddp_models.TiedLanguageModel()
    snapshot.load(plain)
    assert torch.equal(plain.head.weight, model.head.weight)


class Wide(torch.nn.Module):
    """12 MiB with AdamW's moments; a quarter of it is not trained."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(512, 512)) for _ in "abcd"
        )
        self.layers[3].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = x @ layer
        return x.sum()


def await_prepared(snapshot, least):
    end = time.monotonic() + 60
    while snapshot._core.prepared_bytes < least:
        assert time.monotonic() < end, snapshot._core.prepared_bytes
        time.sleep(0.01)
    return snapshot._core.prepared_bytes


def test_the_first_save_finds_its_memory_ready(snapshot):
    """load() counts the moments that the optimizer does not have yet, none of what is frozen."""
    mib = 1 << 20
    model = Wide()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    assert snapshot.load(model, optimizer) == {}
    assert await_prepared(snapshot, (4 + 6) * mib) < (4 + 6 + 1) * mib
    model(torch.randn(2, 512)).backward()
    optimizer.step()
    snapshot.save(1, model, optimizer)
    assert snapshot._core.prepared_bytes == 0
    wanted = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    snapshot.load(model, optimizer)
    for parameter, kept in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter, kept)
    assert snapshot._core.prepared_bytes == 0  # there was a save


@pytest.mark.parametrize(
    ("make_optimizer", "copies"),
    [
        (lambda p: None, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.Adagrad(p), 1),  # has its state from the beginning
        (lambda p: torch.optim.Rprop(p), 0),  # not known
    ],
)
def test_what_an_optimizer_will_have(make_optimizer, copies):
    from libddp.snapshot._expected import expected_pieces

    model = Wide().requires_grad_(True)
    pieces = expected_pieces(model, make_optimizer(list(model.parameters())))
    megabytes = sum(p.tensor.nbytes for p in pieces) >> 20
    assert megabytes == 4 * (1 + copies)
    assert len({piece.key for piece in pieces}) == len(pieces)
    assert expected_pieces(Wide().to("meta"), None) == []


def test_what_cannot_be_kept_is_the_saves_to_say(snapshot):
    import libddp

    model = torch.nn.Linear(3, 4)
    model.register_buffer("sparse", torch.zeros(3, 3).to_sparse())
    assert snapshot.load(model) == {}
    with pytest.raises(libddp.ArgumentError, match=r"'model\.sparse' is a Sparse tensor"):
        snapshot.prepare(model)


def test_status_says_what_is_kept(snapshot):
    assert snapshot.status() == {}
    snapshot.save(4, state={"a": torch.zeros(10)})
    (kept,) = snapshot.status()["ranks"]
    assert {slot.get("step") for slot in kept["slots"]} == {4, None}
    assert json.dumps(snapshot.status())
