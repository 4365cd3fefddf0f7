"""Snapshots and checkpoints of sharded models on other numbers of ranks, and as one file."""

import errno
import json
import os
import shutil
from pathlib import Path

import checks
import fsdp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_states import assert_equal, make, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save_and_load(folder, step, build):
    """One link of a chain: takes up what the last number of ranks has left, in both formats."""
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    fsdp, folder, build = models.libddp_fsdp(), Path(folder), getattr(models, build)
    model, optimizer = make(build, steps=2) if step == 0 else make(build, seed=5)
    if step > 0:
        wanted = torch.load(folder / f"{step - 1}.pt", weights_only=True)
        assert fsdp.load_snapshot(folder / "snapshot", model, optimizer) == {"step": step - 1}
        assert_equal(whole(model, optimizer), wanted)
        model, optimizer = make(build, seed=6)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder / f"dcp-{step - 1}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        assert_equal(whole(model, optimizer), wanted)
    fsdp.save_snapshot(folder / "snapshot", model, optimizer, {"step": step})
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / f"dcp-{step}")
    fsdp.save_safetensors(model, folder / "direct.safetensors")
    state = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, folder / f"{step}.pt")
    destroy_process_group()


CHAIN = [(1, "shard"), (4, "wrap_hybrid"), (3, "shard"), (4, "shard_hybrid"), (2, "wrap")]


def test_from_one_to_four_ranks_and_down_again(tmp_path):
    from libddp.distributed.fsdp import consolidate

    for step, (world, build) in enumerate(CHAIN):
        ranks.run(save_and_load, world, str(tmp_path), step, build)
        files = sorted(path.name for path in (tmp_path / "snapshot").iterdir())
        assert files[0] == "index.json"
        assert [name.split(".")[0] for name in files[1:]] == [
            f"rank-{rank}-of-{world}" for rank in range(world)
        ]
        wanted = torch.load(tmp_path / f"{step}.pt", weights_only=True)[0]
        consolidate(tmp_path / "snapshot", tmp_path / "ours.safetensors")
        consolidate(tmp_path / f"dcp-{step}", tmp_path / "dcp.safetensors")
        for name in ("direct", "ours", "dcp"):
            verify_file(tmp_path / f"{name}.safetensors", wanted)


def verify_file(path, wanted):
    """What the package reads."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, "pt") as file:
        aliases = file.metadata()
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)
    if "head.weight" not in found:
        assert aliases == {"format": "pt", "head.weight": "embedding.weight"}
        found["head.weight"] = found["embedding.weight"]
    assert_equal([found], [wanted])


def broken(folder, name, change):
    """A copy of a snapshot in which one file is changed, the same for all ranks."""
    made = folder.parent / name
    if dist.get_rank() == 0:
        shutil.copytree(folder, made)
        change(made, sorted(made.glob("rank-1-of-2.*"))[0], made / "index.json")
    dist.barrier()
    return made


def cut_short(_, shard, index):
    shard.write_bytes(shard.read_bytes()[:-8])


def remove(_, shard, index):
    shard.unlink()


def rename_in_index(folder, shard, index):
    text = json.loads(index.read_text())
    text["tensors"]["model.other.weight"] = text["tensors"].pop("model.norm.weight")
    for path in folder.glob("rank-*"):
        path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.other.weigh"))
    index.write_text(json.dumps(text))


def spoil_index(_, shard, index):
    index.write_text("{")


def other_version(_, shard, index):
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": 7}))


BROKEN = [
    (cut_short, r"rank-1-of-2\.\w+\.safetensors has \d+ bytes, not \d+"),
    (remove, r"rank-1-of-2\.\w+\.safetensors is missing"),
    (rename_in_index, r"'model.other.weight'"),
    (spoil_index, r"cannot read index.json"),
    (other_version, r"version 7, this is 'libddp-snapshot' version 1"),
]


def check_damaged_snapshots():
    fsdp, folder = models.libddp_fsdp(), checks.shared_folder() / "snapshot"
    model, optimizer = make(models.shard, steps=1)
    fsdp.save_snapshot(folder, model, optimizer)
    again, other = make(models.shard, seed=5)
    before = whole(again, other)
    for number, (change, text) in enumerate(BROKEN):
        bad = broken(folder, f"bad-{number}", change)
        with pytest.raises(fsdp_errors().SnapshotError, match=text):
            fsdp.load_snapshot(bad, again, other)
    with pytest.raises(fsdp_errors().SnapshotError, match=r"cannot read index\.json"):
        fsdp.load_snapshot(folder.parent / "nowhere", again, other)
    assert_equal(whole(again, other), before)
    fsdp.load_snapshot(folder, again, other)
    assert_equal(whole(again, other), whole(model, optimizer))


def check_snapshots_of_other_models():
    fsdp, folder = models.libddp_fsdp(), checks.shared_folder() / "snapshot"
    fsdp.save_snapshot(folder, models.shard(models.build(lambda: models.TinyGpt(layers=2))))
    for layers, width, text in (
        (3, 12, r"'weight' of 'blocks\.2\.norm_1' is not in index\.json"),
        (1, 12, r"'weight' of 'blocks\.1\.norm_1' is not in the model"),
        (2, 16, r"'weight' of 'embedding' has the shape \[13, 12\], in the model \[13, 16\]"),
    ):
        model = models.shard(models.build(lambda n=layers, w=width: models.TinyGpt(n, w), seed=5))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=text):
            fsdp.load_snapshot(folder, model)
        assert_equal([dict(model.named_parameters())], [before])
    model, optimizer = make(models.shard)
    with pytest.raises(ValueError, match=r"of the same model|has no optimizer"):
        fsdp.load_snapshot(folder, model, optimizer)


def check_a_path_that_cannot_be_written():
    fsdp, model = models.libddp_fsdp(), models.shard()
    folder = checks.shared_folder()
    (folder / "file").write_text("")
    cases = (
        (fsdp.save_safetensors, "file/model.safetensors", "Not a directory", "a file stands where"),
        (fsdp.save_safetensors, "no/model.safetensors", "No such file", "choose a path whose"),
    )
    for save, path, reason, hint in cases:
        wanted = rf"cannot write {folder / path}: {reason}.* Hint: {hint}"
        with pytest.raises(fsdp_errors().SnapshotError, match=wanted):
            save(model, folder / path)
    wanted = rf"cannot write {folder / 'file'}: File exists\. Hint: a file stands where a folder"
    with pytest.raises(fsdp_errors().SnapshotError, match=wanted) as caught:
        fsdp.save_snapshot(folder / "file", model)
    assert isinstance(caught.value.__cause__, FileExistsError)
    models.train(model, 1)


def check_one_rank_without_room():
    fsdp, folder = models.libddp_fsdp(), checks.shared_folder() / "full"
    model, optimizer = make(models.shard, steps=1)
    fsdp.save_snapshot(folder, model, optimizer, "first")
    for full in (1, 0):  # rank 1 in its file; rank 0 in the index, which comes when all files are
        calls = []

        def fsync(descriptor, full=full, calls=calls):
            calls.append(descriptor)
            if dist.get_rank() == full and len(calls) > (0 if full else 2):
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            name = r"/rank-1-of-2\.\w+\.safetensors" if full else ""
            wanted = rf"cannot write {folder}{name}: No space left .* Hint: make room there"
            with pytest.raises(fsdp_errors().SnapshotError, match=wanted) as caught:
                fsdp.save_snapshot(folder, model, optimizer, "second")
        is_own = dist.get_rank() == full
        assert (f"rank {full} could not write" in str(caught.value)) != is_own
        dist.barrier()
        assert not list(folder.glob("*.tmp"))
        assert fsdp.load_snapshot(folder, model, optimizer) == "first"


def fsdp_errors():
    import libddp.errors

    return libddp.errors


results, test_on_two_ranks = checks.suite(globals(), 2)
