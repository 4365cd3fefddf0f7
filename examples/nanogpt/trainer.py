"""The state of a training run (network, optimizer, iteration) and what can be done with it.

    trainer = Trainer(settings, corpus, ranks)
    resume.restore(trainer)
    trainer.wrap()
    loss = trainer.step()

Nothing random is carried from one iteration to the next: batches and dropout of an iteration
follow from (seed, rank, iteration) alone. So a resumed run repeats an uninterrupted one bit for
bit, on every rank, although only rank 0 writes a checkpoint.
"""

import contextlib
import math
from typing import NamedTuple

import numpy as np
import torch
from config import UserError
from data import SPLITS, Corpus
from libddp.nn.parallel import DistributedDataParallel as DDP
from model import GPT, GPTConfig
from schedule import learning_rate
from settings import MODEL_KEYS, TrainSettings


class Ranks(NamedTuple):
    """Who we are among how many, and where our tensors live."""

    rank: int
    world: int
    device: torch.device
    distributed: bool


class Trainer:
    """Thread rule: one thread."""

    #: Whether a checkpoint needs all ranks.
    saves_together = False

    def __init__(self, settings: TrainSettings, corpus: Corpus, ranks: Ranks):
        self.settings, self.corpus, self.ranks = settings, corpus, ranks
        self.iteration, self.rate = 0, 0.0
        self.val_loss = self.best_val_loss = math.inf
        self._local_steps, rest = divmod(settings.gradient_accumulation_steps, ranks.world)
        if rest or not self._local_steps:
            raise UserError(
                f"--gradient_accumulation_steps={settings.gradient_accumulation_steps} cannot be "
                f"shared by {ranks.world} ranks: it must be a multiple of {ranks.world}"
            )
        torch.manual_seed(settings.seed + ranks.rank)
        shape = {name: getattr(settings, name) for name in MODEL_KEYS}
        config = GPTConfig(vocab_size=len(corpus.chars), dropout=settings.dropout, **shape)
        self.core = GPT(config).to(ranks.device)
        betas = (settings.beta1, settings.beta2)
        self.optimizer = self.core.configure_optimizers(
            settings.weight_decay, settings.learning_rate, betas
        )
        half = settings.dtype == "float16"  # the only type whose gradients vanish without scaling
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=half)
        self._net = torch.compile(self.core) if settings.compile else self.core
        self._model = self._net

    def wrap(self) -> None:
        """From now on gradients are averaged over all ranks."""
        index = [self.ranks.device.index] if self.ranks.device.type == "cuda" else None
        self._model = DDP(self._net, device_ids=index)

    def weights(self) -> dict:
        """All of them, for a checkpoint."""
        return self.core.state_dict()

    def moments(self) -> dict:
        """The optimizer's whole state, for a checkpoint."""
        return self.optimizer.state_dict()

    def whole_core(self) -> GPT:
        """The network with all of its weights, on rank 0, after the training."""
        return self.core

    def agree(self, wish: bool) -> bool:
        """Whether to save now. Rank 0 decides, and nobody else has to know."""
        return wish

    def follower(self, last: int) -> None:
        """What the other ranks do while rank 0 evaluates and saves: wait in their reduction."""

    @property
    def tokens_per_iteration(self) -> int:
        s = self.settings
        return s.gradient_accumulation_steps * s.batch_size * s.block_size

    def step(self) -> torch.Tensor:
        """Do one iteration; return this rank's mean loss."""
        settings, loss_sum = self.settings, 0.0
        self._seed()
        self.rate = learning_rate(self.iteration, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        for micro_step in range(self._local_steps):
            # The gradients of all micro-steps are summed here and reduced with the last one.
            with self._reducing(micro_step == self._local_steps - 1):
                place = self.ranks.rank * self._local_steps + micro_step  # in the global batch
                draw = (0, settings.seed, self.iteration, place)
                loss = self._loss(self._model, "train", draw) / self._local_steps
                loss_sum += loss.detach()
                self.scaler.scale(loss).backward()
        if settings.grad_clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.core.parameters(), settings.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.iteration += 1
        return loss_sum

    @torch.no_grad()
    def evaluate(self) -> dict:
        """Mean loss of each split on batches that are always the same."""
        self.core.eval()
        means = {}
        for split in SPLITS:
            draws = ((1, self.settings.seed, k) for k in range(self.settings.eval_iters))
            losses = [self._loss(self._evaluated, split, draw) for draw in draws]
            means[f"{split}_loss"] = torch.stack(losses).mean().item()
        self.core.train()
        self.val_loss = means["val_loss"]
        self.best_val_loss = min(self.best_val_loss, self.val_loss)
        return means

    def mfu(self, seconds: float) -> float | None:
        """Model FLOP/s of this rank over a GPU's peak, for iterations of `seconds`; CPU: None."""
        if self.ranks.device.type == "cpu":
            return None
        sequences = self._local_steps * self.settings.batch_size
        return self.core.estimate_mfu(sequences, seconds, self.settings.peak_tflops * 1e12)

    def _reducing(self, reduces: bool):
        """Around a micro-step: whether its backward reduces what has been summed."""
        self._model.require_backward_grad_sync = reduces
        return contextlib.nullcontext()

    @property
    def _evaluated(self):
        """Not wrapped, so that evaluating talks to no other rank."""
        return self._net

    def _loss(self, model, split: str, draw: tuple) -> torch.Tensor:
        x, y = self.corpus.batch(split, draw, self.settings.batch_size, self.ranks.device)
        with self._autocast():
            return model(x, y)[1]

    def _autocast(self):
        if self.settings.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.ranks.device.type, getattr(torch, self.settings.dtype))

    def _seed(self) -> None:
        """Seed dropout for this rank and iteration."""
        entropy = np.random.SeedSequence((self.settings.seed + self.ranks.rank, self.iteration))
        torch.manual_seed(int(entropy.generate_state(1)[0]))
