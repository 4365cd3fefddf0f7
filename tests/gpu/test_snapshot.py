"""`libddp.Snapshot` of tensors on the device: in memory, in a folder, and between devices."""

import pytest
import torch
from subject import DDP, DEVICE, IS_CUDA, synchronize
from test_fsdp import sharded, wrapped
from training import build, train

pytestmark = pytest.mark.libddp
WRAPPERS = {
    "ddp": lambda seed: DDP(build(0.1, seed)),
    "fsdp": lambda seed: wrapped(build(0.1, seed)),
    "fully_shard": lambda seed: sharded(build(0.1, seed)),
}


def opened(folder):
    import libddp

    return libddp.Snapshot(folder, linger=1)


def made(wrapper: str, seed: int):
    model = WRAPPERS[wrapper](seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_repeated_steps_are_those_that_were_lost(wrapper, where, tmp_path):
    """Dropout too: random numbers of the device are part of it."""
    model, optimizer = made(wrapper, 17)
    with opened(tmp_path / "run") as snapshot:
        train(model, 3, optimizer=optimizer)
        report = snapshot.save(3, model, optimizer, extra={"step": 3}, storage=where == "folder")
        assert report is not None
        lost = train(model, 4, optimizer=optimizer)  # changes nothing of what is saved
        other, second = made(wrapper, 99)
        if where == "memory":
            assert snapshot.load(other, second) == {"step": 3}
        else:
            snapshot.wait()
    if where == "folder":
        with opened(tmp_path / "run") as snapshot:
            assert snapshot.load(other, second) == {"step": 3}
    assert all(p.device == DEVICE for p in other.parameters())
    assert train(other, 4, optimizer=second) == lost


def test_what_was_launched_before_is_in_it_and_what_comes_after_is_not(tmp_path):
    """The host is far ahead of the device where save() is called, and goes on at once."""
    values = torch.zeros(1 << 22, device=DEVICE)
    work = torch.randn(2048, 2048, device=DEVICE)
    with opened(tmp_path / "run") as snapshot:
        for _ in range(4):  # both slots, first and again
            for _ in range(40 if IS_CUDA else 1):
                work = (work @ work).clamp(-1, 1)
            values += 1
            wanted = values.clone()
            snapshot.save(1, state={"values": values, "work": work})
            kept = work
            values += 100
            work = work + 1
            found = snapshot.load()
            synchronize()
            assert torch.equal(found["values"].to(DEVICE), wanted)
            assert torch.equal(found["work"].to(DEVICE), kept)


@pytest.mark.cuda
def test_on_a_side_stream(tmp_path):
    side = torch.cuda.Stream()
    work = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    with opened(tmp_path / "run") as snapshot, torch.cuda.stream(side):
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)
        snapshot.save(1, state={"work": work})
        assert torch.equal(snapshot.load()["work"].to(DEVICE), work)


@pytest.mark.cuda
def test_page_locked_memory_does_not_grow_with_the_model(tmp_path):
    """docs/gpu.md: 64 MiB on the way to the host, and back."""

    def locked():
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    model = torch.nn.Linear(8192, 8192, bias=False, device=DEVICE)
    wanted = model.weight.detach().clone()
    before = locked()
    with opened(tmp_path / "run") as snapshot:
        snapshot.save(1, model)
        model.weight.detach().zero_()
        snapshot.load(model)
    assert torch.equal(model.weight, wanted)
    assert locked() - before <= 64 << 20


def test_kinds_of_tensors(tmp_path):
    state = {
        "bf16": torch.randn(7, 5, device=DEVICE).bfloat16(),
        "int": torch.arange(9, device=DEVICE),
        "bool": torch.tensor([True, False, True], device=DEVICE),
        "part": torch.randn(6, 8, device=DEVICE)[:, 1:7:2],
        "turned": torch.randn(6, 8, device=DEVICE).t(),
        "complex": torch.randn(4, dtype=torch.complex64, device=DEVICE).conj(),
        "none": torch.empty(0, 3, device=DEVICE),
        "number": torch.tensor(2.5, device=DEVICE),
        "host": torch.arange(4.0),
    }
    with opened(tmp_path / "run") as snapshot:
        snapshot.save(1, state=state)
        found = snapshot.load()
    assert set(found) == set(state)
    for name, value in state.items():
        assert torch.equal(found[name].cpu(), value.cpu()), name


def test_between_devices(tmp_path):
    model = build()
    train(model, 2)
    with opened(tmp_path / "run") as snapshot:
        snapshot.save(2, model, storage=True)
        snapshot.wait()
    host = build(seed=99, device="cpu")
    with opened(tmp_path / "run") as snapshot:
        snapshot.load(host)
        for name, value in model.state_dict().items():
            assert torch.equal(host.state_dict()[name], value.cpu()), name
        snapshot.save(3, host)
        again = build(seed=98)
        snapshot.load(again)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
