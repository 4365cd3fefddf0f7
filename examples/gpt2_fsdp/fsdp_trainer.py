"""The state of a training run and what can be done with it. All ranks make the same calls.

    trainer = FsdpTrainer(options, corpus, ranks, engine, net)
    loss = trainer.step()              # this rank's mean loss
    rows = trainer.gather([loss])      # what every rank said, one row each

Nothing random is carried from one iteration to the next: dropout follows from seed, rank and
iteration, the data from the order's position. So a resumed run repeats an uninterrupted one bit for
bit on as many ranks, and up to rounding (and dropout) on another number.
"""

import contextlib
import resource
from pathlib import Path

import engine as engines
import numpy as np
import torch
from libddp.distributed import all_reduce, init_process_group
from libddp.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from options import Options, recomputed
from shared import Ranks, Snapshots, UserError, join, learning_rate
from tokens import Order, Tokens
from torch import nn


def meet(options: Options) -> Ranks:
    """Meet the other ranks; a process that no launcher has started is a group by itself."""
    ranks = join(options)
    if not ranks.distributed:
        init_process_group(options.backend, rank=0, world_size=1)
    return ranks


class FsdpTrainer:
    """Thread rule: one thread."""

    def __init__(self, options: Options, corpus: Tokens, ranks: Ranks, engine, net: nn.Module):
        self.options, self.corpus, self.ranks, self.engine = options, corpus, ranks, engine
        self.config, self.iteration, self.rate = net.config, 0, 0.0
        self.saved_at: int | None = None  # the iteration of the newest checkpoint
        folder = Path(options.out_dir) / "snapshots"
        self.snapshots = Snapshots(folder, options.snapshot_every, options.snapshot_storage)
        self.local_steps, rest = divmod(options.gradient_accumulation_steps, ranks.world)
        if rest or not self.local_steps:
            raise UserError(
                f"--gradient_accumulation_steps={options.gradient_accumulation_steps} cannot be "
                f"shared by {ranks.world} ranks: it must be a multiple of {ranks.world}"
            )
        self.order = Order(corpus.count("train"), options.block_size, options.seed)
        self.num_params = net.num_params()
        # Sharded parameters are flat: who is a matrix must be known before.
        decayed = {name for name, parameter in net.named_parameters() if parameter.dim() >= 2}
        self.model = engines.wrap(engine, net, options, ranks.device)
        if options.activation_checkpointing:
            engines.recompute(self.model, recomputed(options))
        self.optimizer = self._optimizer(decayed)
        # Only fp16 has so few exponents that gradients vanish without scaling. A rank sees infinity
        # in its own shard alone, so the ranks tell each other: torch's scaler does, on any engine.
        half = options.mixed_precision == "fp16"
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=half)

    def _optimizer(self, decayed: set[str]) -> torch.optim.AdamW:
        """AdamW that decays matrices and embeddings, but neither gains nor biases."""
        groups = [{"params": [], "weight_decay": self.options.weight_decay}]
        groups.append({"params": [], "weight_decay": 0.0})
        for name, parameter in self.model.named_parameters():
            groups[plain_name(name) not in decayed]["params"].append(parameter)
        return torch.optim.AdamW(groups, lr=self.options.learning_rate, betas=self.options.betas)

    @property
    def tokens_per_iteration(self) -> int:
        o = self.options
        return o.gradient_accumulation_steps * o.batch_size * o.block_size

    def step(self) -> torch.Tensor:
        """Do one iteration; return this rank's mean loss."""
        options, loss_sum = self.options, torch.zeros((), device=self.ranks.device)
        self._seed()
        self.rate = learning_rate(self.iteration, options)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        starts = self.order.take(options.gradient_accumulation_steps * options.batch_size)
        mine = starts.reshape(self.ranks.world, self.local_steps, -1)[self.ranks.rank]
        for number, rows in enumerate(mine, 1):
            with self._reduced_at_the_end(number):
                loss = self._loss("train", rows) / self.local_steps
                self.scaler.scale(loss).backward()
            loss_sum += loss.detach()
        if options.grad_clip:
            self.scaler.unscale_(self.optimizer)
            self.model.clip_grad_norm_(options.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.iteration += 1
        return loss_sum

    def _reduced_at_the_end(self, number: int):
        """Keeps the gradients of all but the last micro-step here, if so wanted."""
        if self.options.no_sync and number < self.local_steps:
            return self.model.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on windows that are always the same, for any number of ranks."""
        options, ranks = self.options, self.ranks
        count = options.eval_iters * options.batch_size
        starts = self.corpus.spread("val", count, options.block_size)
        batches = starts.reshape(options.eval_iters, -1)
        total = 0.0
        self.model.eval()
        for first in range(0, len(batches), ranks.world):
            # All ranks must go forward together: one without a batch of its own does another's.
            mine = first + ranks.rank
            loss = self._loss("val", batches[min(mine, len(batches) - 1)])
            total += loss.item() if mine < len(batches) else 0.0
        self.model.train()
        return float(self.gather([total]).sum()) / len(batches)

    def gather(self, values: list[float]) -> torch.Tensor:
        """What every rank has passed: float64 [world, len(values)], on the host."""
        return gather(values, self.ranks)

    def memory_mib(self) -> float:
        return memory_mib(self.ranks.device)

    def _loss(self, split: str, starts: np.ndarray) -> torch.Tensor:
        block = self.options.block_size
        x, y = self.corpus.windows(split, starts, block, self.ranks.device)
        return self.model(x, y)[1]

    def _seed(self) -> None:
        """Seed dropout for this rank and iteration."""
        entropy = (self.options.seed, self.ranks.rank, self.iteration)
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def gather(values: list[float], ranks: Ranks) -> torch.Tensor:
    """What every rank has passed: float64 [world, len(values)], on the host."""
    table = torch.zeros(ranks.world, len(values), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(values, dtype=torch.float64)
    table = table.to(ranks.device)
    all_reduce(table)
    return table.cpu()


def memory_mib(device: torch.device) -> float:
    """The most that this rank has used so far: on the GPU, or the process's resident pages."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name
