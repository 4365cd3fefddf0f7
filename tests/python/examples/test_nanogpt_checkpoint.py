"""checkpoint.py: a failed or torn write never costs the checkpoint before it."""

import errno
import os
import resource

import checkpoint
import pytest
import torch
from config import UserError


def state(number: int) -> dict:
    return {"iter": number, "model": {"w": torch.full((256, 256), float(number))}}


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_loaded_and_the_previous_kept(tmp_path):
    assert checkpoint.load(tmp_path) is None
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, state(number))
    assert files(tmp_path) == ["ckpt.prev.pt", "ckpt.pt"]
    newest = checkpoint.load(tmp_path)
    assert newest["iter"] == 3
    assert torch.equal(newest["model"]["w"], state(3)["model"]["w"])
    assert torch.load(tmp_path / "ckpt.prev.pt")["iter"] == 2


def test_a_crash_between_the_renames_leaves_the_previous(tmp_path):
    checkpoint.save(tmp_path, state(1))
    os.rename(tmp_path / "ckpt.pt", tmp_path / "ckpt.prev.pt")
    assert checkpoint.load(tmp_path)["iter"] == 1


@pytest.fixture
def no_space():
    """Lets no file grow beyond 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way(tmp_path, request):
    checkpoint.save(tmp_path, state(1))
    request.getfixturevalue("no_space")
    with pytest.raises(UserError) as caught:
        checkpoint.save(tmp_path, state(2))
    path = tmp_path / "ckpt.pt"
    assert str(caught.value) == (
        f"cannot write {path}: File too large; the previous checkpoint {path} is intact"
    )
    assert files(tmp_path) == ["ckpt.pt"]
    assert checkpoint.load(tmp_path)["iter"] == 1


def test_a_full_disk_noticed_by_fsync(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; there is no earlier checkpoint"):
        checkpoint.save(tmp_path, state(1))
    assert files(tmp_path) == []


def test_a_damaged_file_is_named_with_a_way_back(tmp_path):
    for number in (1, 2):
        checkpoint.save(tmp_path, state(number))
    path = tmp_path / "ckpt.pt"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot read") as caught:
        checkpoint.load(tmp_path)
    assert f"'mv {tmp_path / 'ckpt.prev.pt'} {path}'" in str(caught.value)


def test_a_file_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    torch.save({"iter": 1, "model": Evil()}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="cannot read"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "owned").exists()
