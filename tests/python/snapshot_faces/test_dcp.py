"""torch.distributed.checkpoint over a Snapshot: saved by some ranks, taken up by others."""

import json
from pathlib import Path

import fsdp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_states import assert_equal, make, whole
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

#: Seconds: a keeper outlives the ranks of one link of a chain, and not the tests.
LINGER = 45.0


def start(backend):
    from libddp.distributed import init_process_group

    import libddp

    if backend == "libddp":
        init_process_group("libddp")
    else:
        dist.init_process_group(backend)
    return libddp


def whole_tensor(number, *shape):
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float32) * 7 + number).reshape(shape)


def state_of(number, fill=True):
    """Tensors that are sharded in several ways, whole ones, one of a rank alone, and values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def spread(placement, *shape):
        tensor = whole_tensor(number, *shape) if fill else torch.full(shape, -1.0)
        return distribute_tensor(tensor, mesh, [placement])

    rank = dist.get_rank()
    state = {
        "rows": spread(Shard(0), 7, 5),
        "columns": spread(Shard(1), 6, 9),
        "deep": spread(Shard(2), 2, 3, 8),
        "few": spread(Shard(0), 1, 4),
        "same": spread(Replicate(), 3, 3),
        "plain": whole_tensor(number, 4, 2) if fill else torch.zeros(4, 2),
        "scalar": torch.tensor(float(number) if fill else -1.0),
        "strided": (whole_tensor(number, 4, 6) if fill else torch.zeros(4, 6)).t(),
        "nested": {"step": number if fill else -1, "betas": (0.9, 0.95), "none": None},
        "random": torch.full((16,), number if fill else 0, dtype=torch.uint8),
    }
    if rank == 0:
        state["only-0"] = torch.arange(5) * number if fill else torch.zeros(5, dtype=torch.int64)
        state["bytes-0"] = b"\0loader" if fill else b""
    return state


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if hasattr(value, "full_tensor"):
            assert torch.equal(found[key].full_tensor(), value.full_tensor()), key
        elif torch.is_tensor(value):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def tensors_of_all_kinds(folder, number, storage, backend):
    libddp = start(backend)
    from libddp.snapshot import dcp as slots

    snapshot = libddp.Snapshot(Path(folder) / "run", linger=LINGER)
    if number > 0:
        state = state_of(number - 1, fill=False)
        dcp.load(state, storage_reader=slots.SlotReader(snapshot))
        assert_same(state, state_of(number - 1))
    else:
        assert slots.load(state_of(0, fill=False), snapshot) is None
    writer = slots.SlotWriter(snapshot, storage=storage)
    dcp.save(state_of(number), storage_writer=writer, checkpoint_id=f"out/step-{number}")
    if storage:
        snapshot.wait(60)
        snapshot.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("storage", "backend"), [(False, "libddp"), (True, "gloo")], ids=["memory", "folder"]
)
def test_tensors_of_all_kinds(tmp_path, storage, backend):
    for number, world in enumerate([2, 3, 1, 4]):
        ranks.run(tensors_of_all_kinds, world, str(tmp_path), number, storage, backend)


def models_and_optimizers(folder, number, build):
    libddp = start("libddp")
    from libddp.snapshot import dcp as slots

    folder, build = Path(folder), getattr(models, build)
    snapshot = libddp.Snapshot(folder / "run", linger=LINGER)
    model, optimizer = make(build, seed=5 + number, steps=2 if number == 0 else 0)
    weights, moments = get_state_dict(model, optimizer)
    if number > 0:
        assert slots.load({"model": weights, "optim": moments}, snapshot) == number - 1
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        wanted = torch.load(folder / f"{number - 1}.pt", weights_only=True)
        assert_equal(whole(model, optimizer), wanted)
        models.train(model, 1, lambda _: optimizer, first=number)
        weights, moments = get_state_dict(model, optimizer)
    slots.save({"model": weights, "optim": moments}, snapshot, number, storage=number == 1)
    state = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, folder / f"{number}.pt")
    dist.destroy_process_group()


def test_sharded_models(tmp_path):
    chain = [(2, "shard"), (4, "wrap_hybrid"), (3, "wrap"), (1, "shard")]
    for number, (world, build) in enumerate(chain):
        ranks.run(models_and_optimizers, world, str(tmp_path), number, build)


def damaged(folder):
    """The newest save is damaged: an older one is taken, or the load says what is wrong."""
    libddp = start("libddp")
    from libddp.errors import ArgumentError, SnapshotError

    from libddp.snapshot import dcp as slots

    snapshot = libddp.Snapshot(Path(folder) / "run", linger=LINGER)
    for step in (1, 2):
        slots.save(state_of(step), snapshot, step, storage=True)
        snapshot.wait(60)
    with pytest.raises(CheckpointException, match=r"has no step at its end.* Hint: SlotWriter"):
        dcp.save(state_of(1), storage_writer=slots.SlotWriter(snapshot), checkpoint_id="out")
    with pytest.raises(CheckpointException, match=r"there is no save of step 7 that can be loaded"):
        dcp.load(state_of(1), storage_reader=slots.SlotReader(snapshot, step=7))
    with pytest.raises(CheckpointException, match=r"odd is a builtins\.range, which a snapshot"):
        slots.save({"odd": range(3)}, snapshot, 9)
    with pytest.raises(ArgumentError, match=r"was not saved by libddp\.Snapshot"):
        snapshot.load()
    snapshot.close()
    dist.barrier()
    if dist.get_rank() == 0:
        (newest,) = (Path(folder) / "run").glob("step-2.*")
        for path in newest.glob("*.safetensors"):
            spoil(path, whole_tensor(2, 6, 9))
    dist.barrier()
    snapshot = libddp.Snapshot(Path(folder) / "run", linger=LINGER)
    state = state_of(0, fill=False)
    with pytest.raises(CheckpointException, match="step-2"):
        dcp.load(state, storage_reader=slots.SlotReader(snapshot, step=2))
    with pytest.raises(SnapshotError, match=r"none of the saves .*\n.*step-2"):
        slots.load(state, snapshot, step=2)
    assert slots.load(state, snapshot) == 1
    assert_same(state, state_of(1))
    snapshot.close()
    dist.destroy_process_group()


def spoil(path, tensor):
    """Changes a bit of a chunk of the tensor's columns, wherever this file has it."""
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for key, entry in json.loads(data[8:begin]).items():
        if key.startswith("columns@"):
            data[begin + entry["data_offsets"][0]] ^= 1
    path.write_bytes(data)


def test_damaged_saves_and_bad_input(tmp_path):
    ranks.run(damaged, 2, str(tmp_path))


def test_each_host_keeps_one_of_what_ranks_have_alike():
    from libddp.snapshot.dcp._writer import _keys_of

    same, own = ["same", "float32", [0], [2], [2]], ["own", "float32", [0], [2], [4]]
    ranks_of_hosts = [
        {"host": "a", "has": [same], "writes": []},
        {"host": "a", "has": [same, own], "writes": ["same@0", "own@0"]},
        {"host": "b", "has": [same], "writes": []},
        {"host": "b", "has": [same], "writes": []},
    ]
    keeps = [_keys_of(rank, ranks_of_hosts) for rank in range(4)]
    assert keeps[:2] == [set(), {"same@0", "own@0"}]
    assert sorted(map(len, keeps[2:])) == [0, 1]
