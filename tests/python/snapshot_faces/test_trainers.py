"""Lightning's CheckpointIO and accelerate's registered objects over a Snapshot."""

import json
import os
import signal
from pathlib import Path

import pytest
import ranks
import torch
from fsdp_states import assert_equal

#: Seconds.
LINGER = 45.0
STEPS = 6


def lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, number):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Module()


def fit(folder, world, die_at=None, resume=None):
    """Trains under Lightning; saves each step; dies at a step."""
    import lightning
    from libddp.snapshot.lightning import SnapshotCheckpointIO
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Death(Callback):
        def on_train_batch_end(self, trainer, *rest):
            if trainer.global_step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(folder)
    # Batches that are all alike: which of them Lightning repeats is not what is tested.
    data = torch.utils.data.DataLoader(torch.full((STEPS * world, 4), 0.7))
    saves = ModelCheckpoint(folder / "saves", "{step}", every_n_train_steps=1, save_top_k=-1)
    plugin = SnapshotCheckpointIO(folder / "run", store_every=2, linger=LINGER)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        plugins=[plugin],
        callbacks=[saves, Death()],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = lightning_module()
    trainer.fit(module, data, ckpt_path=resume and str(folder / "saves" / f"step={resume}.ckpt"))
    assert trainer.global_step == STEPS
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_lightning_goes_on_after_a_kill(tmp_path, world):
    pytest.importorskip("lightning")
    (wanted, *_) = ranks.run(fit, world, str(tmp_path / "whole"), world)
    died = ranks.launch(fit, world, str(tmp_path / "died"), world, 3)
    assert [outcome.returncode for outcome in died] == [-signal.SIGKILL] * world
    label = json.loads((tmp_path / "died/saves/step=2.ckpt").read_text())
    assert label == {"libddp-snapshot": 2}
    for found in ranks.run(fit, world, str(tmp_path / "died"), world, None, 2):
        assert_equal([found], [wanted])


def lightning_io(folder):
    from libddp.errors import ArgumentError
    from libddp.snapshot.lightning import SnapshotCheckpointIO

    folder = Path(folder)
    plugin = SnapshotCheckpointIO(folder / "run", store_every=2, linger=LINGER)
    for step in (1, 2, 3):
        checkpoint = {"global_step": step, "state_dict": {"w": torch.full((3,), float(step))}}
        plugin.save_checkpoint(checkpoint, folder / f"{step}.ckpt")
    assert plugin.load_checkpoint(folder / "3.ckpt")["state_dict"]["w"].tolist() == [3.0] * 3
    plugin.snapshot.wait(60)
    plugin.snapshot.close()
    plugin = SnapshotCheckpointIO(folder / "run", linger=LINGER)
    assert plugin.load_checkpoint(folder / "2.ckpt")["state_dict"]["w"].tolist() == [2.0] * 3
    with pytest.raises(ArgumentError, match=r"3\.ckpt is of step 3, which is neither in memory"):
        plugin.load_checkpoint(folder / "3.ckpt")
    torch.save({"global_step": 9}, folder / "own.ckpt")
    assert plugin.load_checkpoint(folder / "own.ckpt") == {"global_step": 9}
    plugin.remove_checkpoint(folder / "3.ckpt")
    with pytest.raises(ArgumentError, match=r"no checkpoint at .*3\.ckpt"):
        plugin.load_checkpoint(folder / "3.ckpt")
    with pytest.raises(ArgumentError, match=r"hyper_parameters.* is a builtins\.range"):
        plugin.save_checkpoint({"hyper_parameters": range(3)}, folder / "4.ckpt")
    with pytest.raises(ArgumentError, match=r"store_every=0\. Hint"):
        SnapshotCheckpointIO(folder, store_every=0)
    plugin.teardown()
    plugin.snapshot.close()


def test_lightnings_io(tmp_path):
    pytest.importorskip("lightning")
    ranks.run(lightning_io, 1, str(tmp_path))


def accelerated(folder, last, how):
    """Trains to a step under accelerate, which saves into the snapshot."""
    from accelerate import Accelerator
    from libddp.errors import ArgumentError
    from libddp.snapshot.accelerate import SnapshotState

    import libddp

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5 if how.startswith("save") else 6)
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    state = SnapshotState(libddp.Snapshot(Path(folder) / "run", linger=LINGER), model, optimizer)
    state.attach(accelerator)
    if how == "resume":
        assert state.resume() == 2
    elif how == "load_state":
        accelerator.load_state(f"{folder}/2")
    for step in range(state.step + 1, last + 1):
        state.step = step
        accelerator.backward(model(torch.full((3, 4), float(step))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        state.save()
    if how == "save_state":
        accelerator.save_state(f"{folder}/{last}")
        assert not list(Path(folder, str(last)).glob("model*"))
        state._snapshot.close()
    if how == "load_state":
        with pytest.raises(ArgumentError, match=r"there is no save of step 77"):
            state.load_state_dict({"step": 77})
        state._snapshot.close()
    return {name.split(".")[-1]: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("first", "second"), [("save", "resume"), ("save_state", "load_state")])
def test_accelerate(tmp_path, first, second):
    pytest.importorskip("accelerate")
    ranks.run(accelerated, 2, str(tmp_path), 2, first)
    again = ranks.run(accelerated, 2, str(tmp_path), 4, second)
    (wanted, _) = ranks.run(accelerated, 2, str(tmp_path / "whole"), 4, "save")
    for found in again:
        assert_equal([found], [wanted])
