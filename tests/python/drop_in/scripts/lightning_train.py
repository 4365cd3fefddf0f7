"""LightningModules under Trainer(strategy="ddp"): automatic optimization, and by hand."""

import lightning
import results
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
        )
        self.losses = []

    def training_step(self, batch, index):
        source, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(source), targets)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByHand(Regression):
    """Steps the optimizer itself, so Lightning decides after the forward whether to synchronise."""

    def __init__(self, net, losses):
        super().__init__()
        self.net, self.losses = net, losses
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()

    def on_train_end(self):
        results.write(self.losses, self.trainer.strategy.model)


def fit(module, dataset, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(dataset, 4, shuffle=True))


def main():
    lightning.seed_everything(4)
    dataset = TensorDataset(torch.rand(64, 8), torch.rand(64, 1))
    module = Regression()
    fit(module, dataset, accumulate_grad_batches=2, gradient_clip_val=1.0)
    fit(ByHand(module.net, module.losses), dataset)


if __name__ == "__main__":
    main()
