"""The way of the DDP tutorial series under torchrun: a snapshot, and going on from it."""

import os
import sys

import results
import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, snapshot_path):
        self.rank, self.model, self.optimizer = int(os.environ["LOCAL_RANK"]), model, optimizer
        self.train_data, self.epochs_run, self.losses = train_data, 0, []
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path, map_location="cpu")
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(self.model)

    def run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.run_epoch(epoch)
            if self.rank == 0 and epoch % 2 == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(snapshot, self.snapshot_path)


def dataset():
    torch.manual_seed(5)
    return TensorDataset(torch.rand(61, 20), torch.randint(0, 4, (61,)))


def main(total_epochs):
    init_process_group(backend="nccl" if torch.cuda.is_available() else None)
    train_set = dataset()
    torch.manual_seed(1 + int(os.environ["RANK"]))
    model = torch.nn.Linear(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    loader = DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set))
    path = os.path.join(os.environ["RESULTS"], "snapshot.pt")
    for epochs in (total_epochs // 2, total_epochs):
        trainer = Trainer(model, loader, optimizer, path)
        trainer.train(epochs)
    results.write(trainer.losses, trainer.model)
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
