"""The way of the minGPT-ddp example: a Trainer, DistributedSampler, AMP, snapshots, evaluation."""

import os
from dataclasses import asdict, dataclass

import results
import tiny_gpt
import torch
import torch.distributed
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Snapshot:
    model_state: dict
    optimizer_state: dict
    finished_epoch: int


class CharDataset(Dataset):
    def __init__(self):
        self.data = tiny_gpt.text(1100)

    def __len__(self):
        return 65

    def __getitem__(self, index):
        chunk = self.data[16 * index : 16 * index + tiny_gpt.CONTEXT + 1]
        return chunk[:-1], chunk[1:]


class Trainer:
    def __init__(self, model, optimizer, device):
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.device_type, self.optimizer, self.losses = device, optimizer, []
        self.train_loader = self.prepare_dataloader(CharDataset())
        self.scaler = torch.amp.GradScaler(device, init_scale=256.0)
        self.path = os.path.join(os.environ["RESULTS"], "snapshot.pt")
        self.model = DDP(model)

    @staticmethod
    def prepare_dataloader(dataset):
        return DataLoader(dataset, batch_size=8, shuffle=False, sampler=DistributedSampler(dataset))

    def run_batch(self, source, targets, train):
        with (
            torch.set_grad_enabled(train),
            torch.autocast(device_type=self.device_type, dtype=torch.bfloat16),
        ):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 256.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def run_epoch(self, epoch, train):
        if train:
            self.train_loader.sampler.set_epoch(epoch)
        for source, targets in self.train_loader:
            self.losses.append(self.run_batch(source, targets, train))

    def save_snapshot(self, epoch):
        raw_model = self.model.module if hasattr(self.model, "module") else self.model
        snapshot = Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.path)

    def train(self, epochs=2):
        for epoch in range(epochs):
            self.run_epoch(epoch, train=True)
            if self.local_rank == 0:
                self.save_snapshot(epoch)
            self.run_epoch(epoch, train=False)


def main():
    torch.manual_seed(1337 + int(os.environ["RANK"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = torch.distributed.get_default_backend_for_device(device)
    init_process_group(backend=backend)
    model = tiny_gpt.GPT(buffered=True)
    trainer = Trainer(model, model.configure_optimizers(5e-3), device)
    trainer.train()
    results.write(trainer.losses, trainer.model)
    destroy_process_group()


if __name__ == "__main__":
    main()
