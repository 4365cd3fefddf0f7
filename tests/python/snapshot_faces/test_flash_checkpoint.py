"""DLRover's checkpointers over a Snapshot: saved, started over in new processes, loaded."""

import json
from pathlib import Path

import fsdp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
from fsdp_states import assert_equal, make, whole


def start():
    """A process group; Snapshots made by checkpointers linger as a test needs it."""
    from libddp.distributed import init_process_group
    from libddp.flash_checkpoint import checkpointer

    from libddp import Snapshot

    checkpointer.Snapshot = lambda *args, **kwargs: Snapshot(*args, linger=45.0, **kwargs)
    init_process_group("libddp")


def state_of(step):
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "model": {"weight": weight, "count": torch.tensor(step)},
        "optimizer": {"state": {0: {"exp_avg": weight * 2}}, "param_groups": [{"lr": 0.1 * step}]},
        "iter_num": step,
    }


def same(found, wanted):
    assert_equal([found], [wanted])
    return True


def ddp_saves(folder, disk):
    from libddp.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    start()
    checkpointer = DdpCheckpointer(folder)
    assert checkpointer.load_checkpoint() == {}
    for step in (1, 2, 3):
        to_disk = disk and step < 3
        kind = StorageType.DISK if to_disk else StorageType.MEMORY
        path = f"{folder}/mine-{step}.pt" if step == 2 else ""
        checkpointer.save_checkpoint(step, state_of(step), path, storage_type=kind)
        if to_disk:
            checkpointer.wait_latest_checkpoint(60)
    if disk:
        checkpointer.close()


def ddp_loads(folder, disk):
    from libddp.errors import ArgumentError
    from libddp.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    start()
    checkpointer = DdpCheckpointer(folder)
    newest = checkpointer.load_checkpoint()
    assert same(newest, state_of(2 if disk else 3))
    # Memory goes before a path.
    by_path = checkpointer.load_checkpoint(f"{folder}/1/rank_0.pt" if disk else "anything")
    assert same(by_path, state_of(1 if disk else 3))
    if disk:
        assert same(checkpointer.load_checkpoint(f"{folder}/mine-2.pt"), state_of(2))
        with pytest.raises(ArgumentError, match=r"no checkpoint at .*nowhere.* Hint: ''"):
            checkpointer.load_checkpoint(f"{folder}/nowhere")
    with pytest.raises(ArgumentError, match=r"storage_type='tape' is none"):
        checkpointer.save_checkpoint(4, state_of(4), storage_type="tape")
    with pytest.raises(ArgumentError, match=r"state\['args'\] is a builtins\.range"):
        checkpointer.save_checkpoint(4, {"args": range(3)}, storage_type=StorageType.MEMORY)
    checkpointer.close()


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_ddp(tmp_path, disk):
    ranks.run(ddp_saves, 2, str(tmp_path), disk)
    assert (tmp_path / "dlrover_latest.txt").exists() == disk
    if disk:
        assert (tmp_path / "dlrover_latest.txt").read_text() == "2"
        assert json.loads((tmp_path / "1/rank_0.pt").read_text()) == {"libddp-snapshot": 1}
    ranks.run(ddp_loads, 3, str(tmp_path), disk)


def shards(folder, step, loads):
    from libddp.errors import ArgumentError
    from libddp.flash_checkpoint.ddp import DdpCheckpointer

    start()
    checkpointer = DdpCheckpointer(folder, local_shard_num=2, global_shard_num=2)
    rank = dist.get_rank()
    if not loads:
        checkpointer.save_checkpoint(step, state_of(step + rank))
        checkpointer.wait_latest_checkpoint(60)
    elif dist.get_world_size() == 2:
        assert same(checkpointer.load_checkpoint(), state_of(step + rank))
    else:
        with pytest.raises(ArgumentError, match=r"has the shards of 2 ranks, here are 3\. Hint"):
            checkpointer.load_checkpoint()
        checkpointer.close()


def test_shards_of_ranks(tmp_path):
    ranks.run(shards, 2, str(tmp_path), 5, False)
    ranks.run(shards, 2, str(tmp_path), 5, True)
    ranks.run(shards, 3, str(tmp_path), 5, True)


def take_over(folder):
    from libddp.flash_checkpoint.ddp import DdpCheckpointer

    start()
    checkpointer = DdpCheckpointer(folder)
    assert same(checkpointer.load_checkpoint(), state_of(7))
    assert same(checkpointer.load_checkpoint(f"{folder}/7/rank_0.pt"), state_of(7))
    checkpointer.save_checkpoint(8, state_of(8))
    checkpointer.wait_latest_checkpoint(60)
    assert same(checkpointer.load_checkpoint(), state_of(8))
    checkpointer.close()


def test_goes_on_from_dlrovers_files(tmp_path):
    (tmp_path / "7").mkdir()
    torch.save(state_of(7), tmp_path / "7/rank_0.pt")
    (tmp_path / "dlrover_latest.txt").write_text("7")
    ranks.run(take_over, 1, str(tmp_path))
    assert (tmp_path / "dlrover_latest.txt").read_text() == "8"


class Latest:
    """As DLRover's KeepLatestStepStrategy is made."""

    def __init__(self, count):
        self._max_to_keep = count


def keeps(folder):
    from libddp.errors import ArgumentError
    from libddp.flash_checkpoint.ddp import DdpCheckpointer

    start()
    checkpointer = DdpCheckpointer(folder, deletion_strategy=Latest(1))
    for step in (1, 2):
        checkpointer.save_checkpoint(step, state_of(step))
        checkpointer.wait_latest_checkpoint(60)
    checkpointer.close()
    with pytest.raises(ArgumentError, match=r"1/rank_0.pt is of step 1, which .* does not have"):
        DdpCheckpointer(folder).load_checkpoint(f"{folder}/1/rank_0.pt")
    with pytest.raises(ArgumentError, match=r"deletion_strategy=object says no number"):
        DdpCheckpointer(folder, deletion_strategy=object())
    with pytest.raises(ArgumentError, match=r"replicas=5, and each save has 0 or 1\. Hint"):
        DdpCheckpointer(folder, replica_count=5)


def test_what_is_kept(tmp_path):
    ranks.run(keeps, 1, str(tmp_path))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2.2"]


def torch_wrap(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def fsdp(folder, step, face, build, disk):
    from libddp.flash_checkpoint import fsdp as faces

    start()
    folder = Path(folder)
    build = torch_wrap if build == "torch" else getattr(models, build)
    model, optimizer = make(build, seed=17 + step, steps=2 if step == 0 else 0)
    checkpointer = getattr(faces, face)(str(folder / "out"))
    extra = checkpointer.load_checkpoint(model, optimizer)
    assert extra == ({} if step == 0 else {"step": step - 1, "epoch": 3})
    if step > 0:
        wanted = torch.load(folder / f"{step - 1}.pt", weights_only=True)
        found = whole(model, optimizer)
        for group in found[1]["param_groups"]:
            group["betas"] = tuple(group["betas"])  # torch makes a list of them
        assert_equal(found, wanted)
        models.train(model, 1, lambda _: optimizer, first=step)
    kind = faces.StorageType.DISK if disk else faces.StorageType.MEMORY
    checkpointer.save_checkpoint(step, model, optimizer, {"epoch": 3}, storage_type=kind)
    if disk:
        checkpointer.wait_latest_checkpoint(60)
        checkpointer.close()
    state = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, folder / f"{step}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("face", "builds", "disk"),
    [
        ("FsdpShardCheckpointer", ("shard", "wrap"), False),
        ("FsdpShardCheckpointer", ("torch", "torch"), True),
        ("FsdpFullCheckpointer", ("shard", "wrap"), True),
        ("FsdpFullCheckpointer", ("torch", "torch"), False),
    ],
)
def test_fsdp(tmp_path, face, builds, disk):
    for step, (world, build) in enumerate(zip((2, 3), builds, strict=True)):
        ranks.run(fsdp, world, str(tmp_path), step, face, build, disk)
