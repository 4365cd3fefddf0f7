"""Snapshots and checkpoints of sharded models on other numbers of ranks, and as one file."""

import json
import resource
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

#: Written by save_snapshot before it wrote the format of today.
OLD = Path(__file__).parent / "old_snapshot"


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
        (stored,) = (tmp_path / "snapshot").iterdir()
        files = sorted(path.name for path in stored.iterdir())
        assert files[0] == "index.json"
        assert files[1:] == [f"rank-{rank}-of-{world}.safetensors" for rank in range(world)]
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
    made = folder.parent / name  # or where `name` is, as a path
    if dist.get_rank() == 0:
        shutil.copytree(folder, made)
        change(next(made.rglob("rank-1-of-2.*")), next(made.rglob("index.json")))
    dist.barrier()
    return made


def cut_short(shard, index):
    shard.write_bytes(shard.read_bytes()[:-8])


def remove(shard, index):
    shard.unlink()


def flip_bit(shard, index):
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def spoil_index(shard, index):
    index.write_text("{")


def other_version(shard, index):
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": 7}))


BROKEN = [
    (cut_short, r"rank-1-of-2\.safetensors: it has \d+ bytes, not \d+"),
    (remove, r"rank-1-of-2\.safetensors: .*No such file"),
    (spoil_index, r"index\.json: not JSON"),
    (other_version, r"index\.json: it is of version 7, this is version 2"),
    (flip_bit, r"rank-1-of-2\.safetensors is damaged: bytes 0 to \d+"),
]


def check_damaged_snapshots():
    fsdp, folder = models.libddp_fsdp(), checks.shared_folder() / "snapshot"
    model, optimizer = make(models.shard, steps=1)
    fsdp.save_snapshot(folder, model, optimizer)
    again, other = make(models.shard, seed=5)
    before = whole(again, other)
    for number, (change, text) in enumerate(BROKEN):
        if change is flip_bit:  # what shows only as it is read
            assert_equal(whole(again, other), before)
        bad = broken(folder, f"bad-{number}", change)
        with pytest.raises(fsdp_errors().SnapshotError, match=text):
            fsdp.load_snapshot(bad, again, other)
    with pytest.raises(fsdp_errors().SnapshotError, match=r"nowhere has none that is whole"):
        fsdp.load_snapshot(folder.parent / "nowhere", again, other)
    assert fsdp.load_snapshot(folder, again, other) is None
    assert_equal(whole(again, other), whole(model, optimizer))


def check_snapshots_of_other_models():
    fsdp, folder = models.libddp_fsdp(), checks.shared_folder() / "snapshot"
    fsdp.save_snapshot(folder, models.shard(models.build(lambda: models.TinyGpt(layers=2))))
    for layers, width, text in (
        (3, 12, r"has no 'model\.blocks\.2\.norm_1\.weight'"),
        (1, 12, r"has 'blocks\.1\.[\w.]+', which the model has not"),
        (2, 16, r"embedding.weight' was stored as F32 \[13, 12\], here it is F32 \[13, 16\]"),
    ):
        model = models.shard(models.build(lambda n=layers, w=width: models.TinyGpt(n, w), seed=5))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=text):
            fsdp.load_snapshot(folder, model)
        assert_equal([dict(model.named_parameters())], [before])
    model = models.shard(models.build(lambda: models.TinyGpt(layers=2)))
    with pytest.raises(ValueError, match=r"has no optimizer"):
        fsdp.load_snapshot(folder, model, models.adamw(model.parameters()))


class Tied(torch.nn.Module):
    """What old_snapshot/ was saved of."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.second = torch.nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(5)
        self.small = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))


def tied():
    """The model and the optimizer of old_snapshot/, saved by two ranks behind one step."""
    model = Tied()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 8 + number)
        model.norm.running_mean.fill_(0.25)
    models.libddp_fsdp().fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def check_files_of_earlier_versions():
    """Load, are refused where they are damaged, become one file, and go with the next save."""
    from libddp.distributed.fsdp import consolidate

    fsdp, extra = models.libddp_fsdp(), {"step": 7, "list": [1, None, "x"]}
    folder = broken(OLD, checks.shared_folder() / "old", lambda shard, index: None)
    for number, (change, text) in enumerate(
        [
            (cut_short, r"rank-1-of-2\.\w+\.safetensors has \d+ bytes, not \d+"),
            (remove, r"rank-1-of-2\.\w+\.safetensors is missing"),
            (spoil_index, r"cannot read index.json"),
            (other_version, r"version 7, this is 'libddp-snapshot' version 1"),
        ]
    ):
        bad = broken(OLD, folder.parent / f"old-{number}", change)
        with pytest.raises(fsdp_errors().SnapshotError, match=text):
            fsdp.load_snapshot(bad, *tied())
    with pytest.raises(ValueError, match=r"'weight' of '' is not in index\.json"):
        fsdp.load_snapshot(folder, fsdp.fully_shard(torch.nn.Linear(5, 5)))
    (model, optimizer), wanted = tied(), whole(*tied())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
    assert fsdp.load_snapshot(folder, model, optimizer) == extra
    assert_equal(whole(model, optimizer), wanted)
    if dist.get_rank() == 0:
        consolidate(folder, folder.parent / "old.safetensors")
        safetensors = pytest.importorskip("safetensors")
        with safetensors.safe_open(folder.parent / "old.safetensors", "pt") as file:
            assert file.metadata()["second.weight"] == "first.weight"
            assert torch.equal(file.get_tensor("first.weight"), wanted[0]["first.weight"])
    dist.barrier()
    fsdp.save_snapshot(folder, model, optimizer, [extra])
    assert [path.name for path in folder.iterdir()] == ["step-0.1"]
    assert fsdp.load_snapshot(folder, *tied()) == [extra]


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
    with pytest.raises(fsdp_errors().SnapshotError, match=r"/file/under: .*Not a directory"):
        fsdp.save_snapshot(folder / "file" / "under", model)
    models.train(model, 1)


def check_one_rank_without_room():
    """What is there stays, on all ranks; the next save succeeds."""
    fsdp, folder = models.libddp_fsdp(), checks.shared_folder() / "full"
    model, optimizer = make(models.shard, steps=1)
    fsdp.save_snapshot(folder, model, optimizer, "first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = dist.get_rank() == 1
    if full:  # Python has told the kernel that this is an error and no signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(fsdp_errors().SnapshotError, match=r"File too large") as caught:
            fsdp.save_snapshot(folder, model, optimizer, "second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "rank-1-of-2.safetensors" in str(caught.value)
    assert ("rank 1 could not save" in str(caught.value)) != full
    assert fsdp.load_snapshot(folder, model, optimizer) == "first"
    fsdp.save_snapshot(folder, model, optimizer, "third")
    assert [path.name for path in folder.iterdir()] == ["step-0.2"]
    assert fsdp.load_snapshot(folder, model, optimizer) == "third"


def fsdp_errors():
    import libddp.errors

    return libddp.errors


results, test_on_two_ranks = checks.suite(globals(), 2)
