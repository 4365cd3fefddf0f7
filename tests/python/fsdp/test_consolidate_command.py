"""libddp consolidate from the command line, on a snapshot of two ranks."""

import fsdp_models as models
import pytest
import ranks
import torch
from libddp.__main__ import main


def save(folder):
    import torch.distributed.checkpoint as dcp
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    model = models.shard(models.build(lambda: models.TinyGpt(layers=1)))
    models.libddp_fsdp().save_snapshot(f"{folder}/snapshot", model)
    dcp.save({"net": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    destroy_process_group()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("consolidate")
    ranks.run(save, 2, str(folder))
    return folder


def run(capsys, *arguments):
    status = main(["consolidate", *map(str, arguments)])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    ("folder", "options", "number"), [("snapshot", [], 15), ("dcp", ["--prefix=net."], 16)]
)
def test_one_file(checkpoints, tmp_path, capsys, folder, options, number):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    status, printed = run(capsys, checkpoints / folder, path, *options)
    assert (status, printed.err) == (0, "")
    assert printed.out.startswith(f"{path}: {number} tensors, ")
    found = safetensors.load_file(path)
    wanted = models.build(lambda: models.TinyGpt(layers=1)).state_dict()
    assert len(found) == number
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_a_file_is_replaced_only_on_demand(checkpoints, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    path.write_text("mine")
    status, printed = run(capsys, checkpoints / "snapshot", path)
    assert status == 1
    assert "is there already. Hint: choose another name, or pass --force" in printed.err
    assert path.read_text() == "mine"
    assert run(capsys, checkpoints / "snapshot", path, "--force")[0] == 0
    assert path.stat().st_size > 1000


def test_wrong_input(checkpoints, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    file = next((checkpoints / "snapshot").rglob("rank-0-*"))
    for arguments, text in (
        ((tmp_path / "nowhere", path), "nowhere is no folder. Hint: pass the one that"),
        ((file, path), "is no folder"),
        ((tmp_path, path), "is no checkpoint: "),
        ((checkpoints / "snapshot", tmp_path), "is a folder. Hint: name the file in it"),
        ((checkpoints / "snapshot", tmp_path / "no" / "file"), "no/file: No such file"),
        ((checkpoints / "dcp", path), "begins with 'model.'"),
    ):
        status, printed = run(capsys, *arguments)
        assert (status, printed.out) == (1, "")
        assert printed.err.startswith("libddp consolidate: ")
        assert text in printed.err
    assert not path.exists()


def test_help(capsys):
    for arguments, text in ((["consolidate"], "required: checkpoint, output"), ([], "consolidate")):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main(["consolidate", "--help"])
    assert error.value.code == 0
    assert "--prefix" in capsys.readouterr().out
