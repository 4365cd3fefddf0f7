"""transformers' Trainer over a Snapshot: killed, started again, as if nothing had happened."""

import os
import signal
from pathlib import Path

import pytest
import ranks
import torch
from fsdp_states import assert_equal

pytest.importorskip("transformers")

STEPS = 6


def model_of(seed):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))

        def forward(self, x):
            return {"loss": self.layers(x).square().mean()}

    return Model()


def train(folder, face, die_at=None, seed=3):
    from libddp.flash_checkpoint.hf_trainer import FlashCkptTrainer
    from libddp.snapshot.transformers import SnapshotCallback, TrainerSaves
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import libddp

    class Death(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        save_strategy="steps" if face == "trainer" else "no",
    )
    data = [{"x": torch.full((4,), number / 10)} for number in range(64)]
    run = libddp.Snapshot(Path(folder) / "run", linger=45.0, random=False)
    kinds = {"args": args, "train_dataset": data}
    if face == "trainer":
        trainer = FlashCkptTrainer(model_of(seed), callbacks=[Death()], **kinds)
        trainer._saves = TrainerSaves(run)
        last = trainer.get_last_checkpoint()
    else:
        callback = SnapshotCallback(run)
        trainer = Trainer(model_of(seed), callbacks=[callback, Death()], **kinds)
        last = callback.checkpoint(trainer)
    trainer.train(resume_from_checkpoint=last or None)
    if face == "trainer":
        trainer.wait_latest_checkpoint(60)
        assert Path(folder, "dlrover_latest.txt").read_text() == str(STEPS)
        assert Path(folder, f"checkpoint-{STEPS}", "pytorch_model.bin").exists()
    run.close()
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return os.path.basename(last or ""), parameters


@pytest.mark.parametrize(("face", "resumed"), [("trainer", 2), ("callback", 3)])
def test_goes_on_after_a_kill(tmp_path, face, resumed):
    ((none, wanted),) = ranks.run(train, 1, str(tmp_path / "whole"), face)
    assert none == ""
    (died,) = ranks.launch(train, 1, str(tmp_path / "died"), face, 3)
    assert died.returncode == -signal.SIGKILL, ranks.describe(died)
    ((last, found),) = ranks.run(train, 1, str(tmp_path / "died"), face, None, 9)
    assert last == f"checkpoint-{resumed}"
    assert_equal([found], [wanted])
