"""Trains a model on a data set, epoch by epoch, on one rank or many.

    trainer = Trainer(trainer_config, optimizer_config, model, train_set, test_set, ranks)
    trainer.restore()
    trainer.train()

The batch size is that of all ranks together. The sampler deals the shuffled samples out in turn, so
the k-th batches of the ranks together are the same samples for every number of ranks: 1, 2 and 4
ranks take the same steps up to rounding (and up to dropout, which is drawn per rank).
"""

import random
from dataclasses import dataclass

import restarts
import snapshot
import storage
import torch
from char_dataset import CharDataset
from errors import UserError
from libddp.elastic.dataloader import ElasticDataLoader
from libddp.elastic.sampler import ElasticDistributedSampler
from libddp.nn.parallel import DistributedDataParallel as DDP
from model import GPT
from ranks import Ranks


@dataclass
class OptimizerConfig:
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float


@dataclass
class TrainerConfig:
    max_epochs: int
    batch_size: int
    data_loader_workers: int
    grad_norm_clip: float
    snapshot_path: str
    save_every: int
    snapshot_every: int
    snapshot_storage: int
    snapshot_folder: str
    log_every: int
    use_amp: bool | None
    amp_dtype: str
    device: str
    seed: int


class Trainer:
    """Thread rule: one thread. Every rank makes the same calls."""

    def __init__(
        self,
        config: TrainerConfig,
        optimizer_config: OptimizerConfig,
        model: GPT,
        train_set: CharDataset,
        test_set: CharDataset,
        ranks: Ranks,
    ):
        self.config, self.ranks, self.chars = config, ranks, train_set.chars
        self.finished_epochs = 0
        #: Of the epoch that is under way: steps, and the sum of this rank's losses.
        self.done_steps, self.loss_sum = 0, torch.zeros((), dtype=torch.float64)
        self.loaders = {"train": self._loader(train_set), "test": self._loader(test_set)}
        #: Of whole epochs: a loader that goes on amid one counts what is left.
        self.num_steps = {name: len(loader) for name, loader in self.loaders.items()}
        self.core = model.to(ranks.device)
        self.optimizer = torch.optim.AdamW(
            model.parameter_groups(optimizer_config.weight_decay),
            lr=optimizer_config.learning_rate,
            betas=(optimizer_config.beta1, optimizer_config.beta2),
        )
        self.use_amp = config.use_amp
        if self.use_amp is None:
            self.use_amp = ranks.device.type == "cuda"
        # float16 alone has so few exponents that gradients vanish without scaling.
        half = self.use_amp and config.amp_dtype == "float16"
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=half)
        self.model = self.core

    def restore(self) -> None:
        """Go on where the snapshot ends, if there is one, and wrap the model.

        Rank 0 alone reads and writes snapshots, so the path need not be seen by other hosts.
        """
        path = self.config.snapshot_path
        self.ranks.on_first(lambda: storage.try_out(path, "snapshot"))
        data = self.ranks.on_first(lambda: storage.read(path, "snapshot"))
        if data is not None:
            snapshot.unpack(data, self, path)
            self._say(f"resuming {path} after epoch {self.finished_epochs}")
        if self.ranks.distributed:
            index = [self.ranks.device.index] if self.ranks.device.type == "cuda" else None
            self.model = DDP(self.core, device_ids=index)
        self.restarts = restarts.Restarts(self)
        if self.restarts.resume():
            where = f"step {self.done_steps} of epoch {self.finished_epochs + 1}"
            self._say(f"resuming {self.config.snapshot_folder} at {where}")

    def train(self) -> list[tuple[float, float]]:
        """Train up to `max_epochs`; return (train loss, test loss) of each epoch done here."""
        losses, last = [], self.config.max_epochs
        if self.finished_epochs >= last:
            self._say(f"epoch {last} is done: a larger trainer_config.max_epochs trains on")
        for epoch in range(self.finished_epochs, last):
            if not self.done_steps:  # else a snapshot has brought its random state along
                self._seed(epoch)
            losses.append((self._epoch(epoch, "train"), self._epoch(epoch, "test")))
            self.finished_epochs = epoch + 1
            line = "epoch {} | train loss {:.5f} | test loss {:.5f}"
            self._say(line.format(self.finished_epochs, *losses[-1]))
            if self.finished_epochs % self.config.save_every == 0 or self.finished_epochs == last:
                self.ranks.on_first(self._save)
        self.restarts.close()
        return losses

    def _epoch(self, epoch: int, name: str) -> float:
        """One pass over a data set; return its mean loss over all ranks."""
        loader, training = self.loaders[name], name == "train"
        loader.sampler.set_epoch(epoch)  # shuffle anew, on every rank in the same way
        self.model.train(training)
        loss_sum = self.loss_sum.to(self.ranks.device)
        for number, (x, y) in enumerate(loader, self.done_steps + 1):
            x, y = (part.to(self.ranks.device, non_blocking=True) for part in (x, y))
            loss = self._step(x, y, training)
            loss_sum += loss  # batches are all of one size
            if training:
                self._tell(epoch, number, loss)
                self.restarts.save(epoch, number, loss_sum)
        self.done_steps, self.loss_sum = 0, torch.zeros((), dtype=torch.float64)
        return self.ranks.sum(loss_sum).item() / (self.num_steps[name] * self.ranks.world)

    def _tell(self, epoch: int, number: int, loss: torch.Tensor) -> None:
        if number % self.config.log_every == 0:
            steps = self.num_steps["train"]
            self._say(f"epoch {epoch + 1} | step {number}/{steps} | loss {loss:.5f}")

    def _step(self, x: torch.Tensor, y: torch.Tensor, training: bool) -> torch.Tensor:
        """Loss of one batch, x and y int64 [batch, block_size]; in training also the update."""
        dtype = getattr(torch, self.config.amp_dtype)
        amp = torch.autocast(self.ranks.device.type, dtype, enabled=self.use_amp)
        with torch.set_grad_enabled(training), amp:
            loss = self.model(x, y)[1]
        if training:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)  # else the scaled gradients would be clipped
            torch.nn.utils.clip_grad_norm_(self.core.parameters(), self.config.grad_norm_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def _loader(self, dataset: CharDataset) -> ElasticDataLoader:
        """This rank's share of full batches; a tail that is no full batch is left out."""
        world, size = self.ranks.world, self.config.batch_size
        where = f"trainer_config.batch_size={size}"
        if size % world:
            raise UserError(
                f"{where} (of all ranks together) cannot be shared by {world} ranks. "
                f"Hint: a multiple of {world}"
            )
        if len(dataset) < size:
            raise UserError(
                f"{where} is more than the {len(dataset)} samples of a data set. Hint: a smaller "
                "batch_size, a longer text, or a smaller data_config.stride"
            )
        sampler = ElasticDistributedSampler(
            dataset, world, self.ranks.rank, seed=self.config.seed, drop_last=True
        )
        return ElasticDataLoader(
            dataset,
            size // world,
            sampler=sampler,
            drop_last=True,
            num_workers=self.config.data_loader_workers,
            pin_memory=self.ranks.device.type == "cuda",
        )

    def _seed(self, epoch: int) -> None:
        """Dropout of an epoch follows from seed, epoch and rank, so a resumed run repeats it."""
        name = f"{self.config.seed} {epoch} {self.ranks.rank}"
        torch.manual_seed(random.Random(name).getrandbits(63))

    def _save(self) -> None:
        path = self.config.snapshot_path
        storage.replace(path, snapshot.pack(self), "snapshot")
        self._say(f"saved {path} after epoch {self.finished_epochs}")

    def _say(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, flush=True)
