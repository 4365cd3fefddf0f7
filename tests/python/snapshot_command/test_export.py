"""libddp snapshot export: files that the package safetensors reads."""

import pytest
import saved_runs
import torch
from libddp._snapshot_command import _export

import libddp

safetensors = pytest.importorskip("safetensors")


#: A tensor of each type that the package reads.
MANY = {
    str(dtype): torch.tensor([1.0, 0.0, 3.0]).to(dtype)
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}


def contents(path):
    """Tensors by name, and the metadata."""
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize("batch_bytes", [1, 5000, 64 << 20])
def test_the_model(saved, tmp_path, command, monkeypatch, batch_bytes):
    monkeypatch.setattr(_export, "_BATCH_BYTES", batch_bytes)
    path = tmp_path / "model.safetensors"
    status, printed = command("export", saved / "run", path, "--model-only")
    assert (status, printed.err) == (0, "")
    tensors, metadata = contents(path)
    assert printed.out.startswith(f"{path}: {len(tensors)} tensors of step 7 (save 2), ")
    wanted = saved_runs.build().state_dict()
    aliases = {name: first for name, first in metadata.items() if name != "format"}
    assert len(aliases) == 1
    assert tensors.keys() | aliases.keys() == wanted.keys()
    for name, value in wanted.items():
        found = tensors[aliases.get(name, name)]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_everything(saved, tmp_path, command):
    path = tmp_path / "all.safetensors"
    assert command("export", saved / "run", path, "--step", "5")[0] == 0
    tensors = contents(path)[0]
    names = saved_runs.build().state_dict().keys()
    moments = [name for name in tensors if name.endswith(".exp_avg")]
    assert moments
    for name in moments:
        parameter = name.removeprefix("optimizer.state.").removesuffix(".exp_avg")
        assert parameter in names
        assert tensors[name].shape == tensors[parameter].shape
    assert any(name.startswith("rank-1.") for name in tensors)


def test_odd_names(tmp_path, command):
    model = saved_runs.OddModel()
    with libddp.Snapshot(tmp_path / "run", linger=5) as snapshot:
        snapshot.save(1, model, storage=True)
        snapshot.wait(60)
    path = tmp_path / "out.safetensors"
    assert command("export", tmp_path / "run", path, "--model-only")[0] == 0
    tensors, metadata = contents(path)
    assert torch.equal(tensors[saved_runs.ODD_NAME], model.state_dict()[saved_runs.ODD_NAME])
    assert metadata["second.weight"] == "first.weight"
    assert "second.weight" not in tensors


def test_names_that_meet(tmp_path, command):
    model = torch.nn.Module()
    model.state = torch.nn.Module()
    model.register_buffer("state_", torch.zeros(1))
    setattr(model, "rank-0", torch.nn.Module())
    getattr(model, "rank-0").register_buffer("0", torch.zeros(1))
    with libddp.Snapshot(tmp_path / "run", linger=5) as snapshot:
        snapshot.save(1, model, extra={"tensor": torch.ones(2)}, storage=True)
        snapshot.wait(60)
    path = tmp_path / "out.safetensors"
    status, printed = command("export", tmp_path / "run", path)
    assert status == 1
    assert "cannot be named 'rank-0.0' in the file, as '" in printed.err
    assert "Hint: export with --model-only" in printed.err
    assert not path.exists()
    assert command("export", tmp_path / "run", path, "--model-only")[0] == 0


def test_no_model(tmp_path, command):
    with libddp.Snapshot(tmp_path / "run", linger=5) as snapshot:
        snapshot.save(1, state=[value for _, value in sorted(MANY.items())], storage=True)
        snapshot.wait(60)
    path = tmp_path / "out.safetensors"
    status, printed = command("export", tmp_path / "run", path, "--model-only")
    assert status == 1
    assert "has no tensor that begins with 'model.'. Hint: " in printed.err
    assert command("export", tmp_path / "run", path)[0] == 0
    tensors = contents(path)[0]
    for i, (_, value) in enumerate(sorted(MANY.items())):
        found = tensors[f"state.{i}"]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.view(torch.uint8).tolist() == value.view(torch.uint8).tolist()


def test_damage_shows_on_the_way(folder, tmp_path, command):
    damaged = folder / "step-7.2" / "rank-1-of-2.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    path = tmp_path / "out.safetensors"
    path.write_text("mine")
    status, printed = command("export", folder, path, "--force")
    assert status == 1
    assert f"{damaged} is damaged: bytes 0 to " in printed.err
    assert path.read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.safetensors", "run"]
    assert command("export", folder, path, "--force", "--step", "5")[0] == 0


def test_outputs_that_will_not_do(saved, tmp_path, command):
    path = tmp_path / "out.safetensors"
    path.write_text("mine")
    for output, text in (
        (path, "is there already. Hint: choose another name, or pass --force"),
        (tmp_path, "is a folder. Hint: name the file in it"),
        (tmp_path / "no" / "file", "no/file: No such file"),
    ):
        status, printed = command("export", saved / "run", output)
        assert (status, printed.out) == (1, "")
        assert printed.err.startswith("libddp snapshot export: ")
        assert text in printed.err
    assert path.read_text() == "mine"
