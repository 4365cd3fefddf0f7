"""train_fsdp.py: the losses of train.py, and checkpoints that either takes up on other ranks."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("libddp.distributed.fsdp", reason="libddp is not installed")
import nanogpt_runs
import train
from config import UserError
from launches import finish, launch, ranks
from report import read_metrics
from train import Ranks, Trainer

FOLDER = Path(train.__file__).parent
TINY = [
    *nanogpt_runs.TINY,
    "--lr_decay_iters=12",
    "--gradient_accumulation_steps=4",
    "--eval_interval=4",
]


def run_script(number: int, script: str, folder: Path, *arguments: str) -> str:
    launcher = ranks(number, forked=script == "train.py")
    ((status, output),) = finish(launch([*launcher, FOLDER / script, *arguments], folder))
    assert status == 0, output
    return output


def test_the_losses_of_ddp_also_after_resuming_on_other_ranks(tmp_path, text_file, monkeypatch):
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    shared = [*TINY, f"--data={text_file}"]
    run_script(2, "train.py", tmp_path, *shared, f"--out_dir={ddp}", "--max_iters=12")
    run_script(2, "train_fsdp.py", tmp_path, *shared, f"--out_dir={fsdp}", "--max_iters=6")
    first = torch.load(fsdp / "ckpt.pt", weights_only=True)
    output = run_script(
        1, "train_fsdp.py", tmp_path, *shared, f"--out_dir={fsdp}", "--max_iters=12"
    )
    assert "at iteration 6: training on to 12" in output or "resuming" in output, output
    assert len((fsdp / "sample.txt").read_text()) == 21
    ours, theirs = read_metrics(fsdp / "metrics.jsonl"), read_metrics(ddp / "metrics.jsonl")
    ours = {r["iter"]: r for r in ours}
    for record in theirs:
        found = ours[record["iter"]]
        if record["iter"] < 6:  # rank 0's own loss is over its part of the batch
            assert found["loss"] == pytest.approx(record["loss"], rel=1e-4)
        if record["val_loss"] is not None:
            assert found["val_loss"] == pytest.approx(record["val_loss"], rel=1e-3)
    last, wanted = (torch.load(out / "ckpt.pt", weights_only=True) for out in (fsdp, ddp))
    assert first["iter"] == 6
    assert list(last["model"]) == list(wanted["model"])
    for name, value in wanted["model"].items():
        assert last["model"][name].shape == value.shape
    for key, entries in wanted["optimizer"]["state"].items():
        assert last["optimizer"]["state"][key]["exp_avg"].shape == entries["exp_avg"].shape
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # And train.py, alone, takes up what sharded ranks have left.
    arguments = [*shared, f"--out_dir={fsdp}", "--max_iters=13"]
    assert train.main(arguments) == 0
    assert torch.load(fsdp / "ckpt.pt", weights_only=True)["iter"] == 13


def test_what_is_not_there_yet_is_said():
    settings = train.TrainSettings(compile=True)
    with pytest.raises(UserError, match="does not compile"):
        Trainer(settings, None, Ranks(0, 1, torch.device("cpu"), False), shard=True)
