"""Snapshots: resuming, what is refused, and what a failed write leaves."""

import errno
import os
import resource
import stat

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from mingpt_runs import LINE, UserError, config, mingpt, train
from states import assert_same

storage = mingpt.storage
DROPOUT = "gpt_config.resid_pdrop=0.1"
ONE, TWO = "trainer_config.max_epochs=1", "trainer_config.max_epochs=2"


def weights(path) -> dict:
    with fsspec.open(str(path), "rb") as file:
        return torch.load(file, weights_only=True)


@pytest.mark.parametrize("amp", [[], ["trainer_config.use_amp=true"]], ids=["float32", "float16"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, text_file, capsys, amp):
    whole, parts = tmp_path / "whole.pt", tmp_path / "new" / "parts.pt"
    uninterrupted = train(text_file, whole, DROPOUT, *amp)
    assert train(text_file, parts, DROPOUT, ONE, *amp) == uninterrupted[:1]
    assert f"saved {parts} after epoch 1" in capsys.readouterr().out
    assert train(text_file, parts, DROPOUT, *amp) == uninterrupted[1:]
    assert f"resuming {parts} after epoch 1" in capsys.readouterr().out
    assert_same(weights(parts), weights(whole))
    assert bool(weights(whole)["scaler"]) == bool(amp)
    assert uninterrupted[1][1] < uninterrupted[0][1] < 3.4
    assert train(text_file, parts, DROPOUT, *amp) == []
    assert "epoch 2 is done: a larger trainer_config.max_epochs" in capsys.readouterr().out
    assert os.listdir(tmp_path / "new") == ["parts.pt"]


def test_save_every(tmp_path, text_file, capsys):
    train(
        text_file, tmp_path / "s.pt", "trainer_config.max_epochs=3", "trainer_config.save_every=2"
    )
    saved = [line for line in capsys.readouterr().out.splitlines() if line.startswith("saved")]
    assert [line.split()[-1] for line in saved] == ["2", "3"]


def test_a_resumed_run_takes_the_learning_rate_of_now(tmp_path, text_file):
    path = tmp_path / "s.pt"
    train(text_file, path, ONE)
    train(text_file, path, "optimizer_config.learning_rate=0.001")
    groups = weights(path)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.001, 0.001]


def test_in_memory(text_file):
    path = "memory://snapshots/run.pt"
    first = train(text_file, path, ONE)
    assert weights(path)["finished_epochs"] == 1
    assert len(first + train(text_file, path)) == 2


def test_another_model_is_refused(tmp_path, text_file):
    path = tmp_path / "s.pt"
    train(text_file, path, ONE)
    message = "of another model: n_layer is 2 there and 3 here, n_embd is 32 there and 16 here"
    with pytest.raises(UserError, match=message + r"\. Hint: "):
        train(text_file, path, "gpt_config.n_layer=3", "gpt_config.n_embd=16")
    with pytest.raises(UserError, match="block_size is 16 there and 8 here"):
        train(text_file, path, "data_config.block_size=8")
    text_file.write_text(LINE.replace("q", "Q") * 40)
    with pytest.raises(UserError, match=r"text with other characters \(such as \['Q', 'q'\]\)"):
        train(text_file, path)


@pytest.mark.parametrize("cut", [0, 100, -100])
def test_a_damaged_snapshot_is_refused(tmp_path, text_file, cut):
    path = tmp_path / "s.pt"
    train(text_file, path, ONE)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=rf"cannot read the snapshot {path}: .*Hint: "):
        train(text_file, path)


def test_a_file_of_another_kind_is_refused(tmp_path, text_file):
    path = tmp_path / "s.pt"
    torch.save({"epoch": 3}, path)
    with pytest.raises(UserError, match="it is not a snapshot of this program"):
        train(text_file, path)
    torch.save(config, path)  # would run code when loaded
    with pytest.raises(UserError, match="cannot read the snapshot"):
        train(text_file, path)


def test_an_unwritable_path_is_found_before_training(tmp_path, text_file, capsys):
    for path, why in (
        (text_file / "s.pt", "(Not a directory|File exists)"),
        (tmp_path, "it is a folder"),
        ("/proc/s.pt", ""),
        ("zzz://s.pt", ".*zzz"),
    ):
        with pytest.raises(UserError, match=rf"cannot write the snapshot {path}: {why}.*Hint: "):
            train(text_file, path)
    assert "epoch" not in capsys.readouterr().out


def test_a_full_disk_leaves_the_earlier_snapshot(tmp_path, text_file, monkeypatch):
    path = tmp_path / "s.pt"
    train(text_file, path, ONE)
    before, original = path.read_bytes(), os.fsync

    def fsync(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size > 1000:  # not the one of the try-out
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(UserError, match=f"snapshot {path}: No space left on device. Hint: "):
            train(text_file, path)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["s.pt", "text.txt"]
    assert len(train(text_file, path)) == 1


def test_a_write_that_the_system_cuts_short(tmp_path):
    path = str(tmp_path / "file")
    storage.replace(path, b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, limits[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write the file {path}: File too large"):
            storage.replace(path, bytes(1 << 23))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert storage.read(path) == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_upload_leaves_the_earlier_snapshot(text_file, monkeypatch):
    path = "memory://snapshots/upload.pt"
    train(text_file, path, ONE)
    before, original = storage.read(path), MemoryFileSystem.pipe_file

    def pipe_file(self, place, value, **options):
        if len(value) > 1000:
            raise ConnectionResetError(errno.ECONNRESET, "connection reset")
        original(self, place, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(UserError, match=f"cannot write the snapshot {path}: connection reset"):
        train(text_file, path)
    assert storage.read(path) == before
