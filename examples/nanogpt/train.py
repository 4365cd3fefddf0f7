"""Trains a small character-level GPT with libddp, alone or on any number of ranks.

    python train.py --n_layer=2                                       # one process
    libddp run --nproc-per-node=2 train.py --max_iters=1000           # two ranks, DDP
    libddp run --nproc-per-node=2 train_fsdp.py --max_iters=1000      # two ranks, FSDP
    torchrun --nproc-per-node=2 train.py --config=mine.json           # another launcher

`--help` lists the keys. Ctrl-C or SIGTERM saves and stops; the same command then goes on. Only the
imports from libddp differ from a script for torch.distributed.
"""

import contextlib
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import checkpoint
import config
import libddp.distributed as dist
import numpy as np
import torch
from checkpoint import StopSignal
from config import CommonSettings, UserError, key, parse, run_script
from data import SPLITS, Corpus
from device import choose, precision
from libddp.nn.parallel import DistributedDataParallel as DDP
from model import GPT, GPTConfig
from plot import plot
from prepare import prepare
from report import Report
from sample import write_sample
from snapshots import Snapshots

# These describe the network itself: a checkpoint can be resumed only with the same values.
MODEL_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "bias")


@dataclass
class TrainSettings(CommonSettings):
    """Names follow nanoGPT where it has them."""

    # Where things are.
    out_dir: str = key("out/nanogpt", "folder of checkpoint, metrics, plot and sample")
    data: str = key("", "your text: a path or fsspec URL; empty: Python's own standard library")
    data_dir: str = key("", "folder of train.bin, val.bin, meta.json; empty: OUT_DIR/data")
    corpus_mib: float = key(4.0, "size limit of the default corpus in MiB")
    # How long, and what is reported.
    init_from: str = key("auto", "auto (resume if there is a checkpoint), scratch or resume")
    max_iters: int = key(600, "iterations to train")
    extend: bool = key(False, "a complete run continues for another MAX_ITERS iterations")
    log_interval: int = key(10, "iterations between log lines")
    eval_interval: int = key(100, "iterations between evaluations, on rank 0")
    eval_iters: int = key(20, "batches per evaluation and split")
    checkpoint_seconds: float = key(60.0, "at most this much training is lost by a crash")
    tensorboard: bool = key(False, "also write TensorBoard scalars to OUT_DIR/tensorboard")
    plot: bool = key(False, "draw OUT_DIR/loss.png at the end")
    sample_tokens: int = key(500, "characters written to OUT_DIR/sample.txt at the end; 0: none")
    # The network.
    n_layer: int = key(4, "transformer blocks")
    n_head: int = key(4, "attention heads per block")
    n_embd: int = key(128, "width; a multiple of n_head")
    block_size: int = key(128, "characters of context")
    dropout: float = key(0.0, "share of activations dropped in training")
    bias: bool = key(False, "bias terms in Linear and LayerNorm")
    # The optimizer.
    batch_size: int = key(12, "sequences per micro-step")
    gradient_accumulation_steps: int = key(4, "micro-steps per iteration, shared by all ranks")
    beta1: float = key(0.9, "first beta of AdamW")
    beta2: float = key(0.99, "second beta of AdamW")
    # The machine.
    dtype: str = key("auto", "float32, bfloat16, float16 (autocast); auto: half where on a GPU")
    compile: bool = key(False, "torch.compile the network")
    seed: int = key(1337, "rank r draws from seed + r")
    peak_tflops: float = key(312.0, "TFLOP/s of a GPU that count as 100% mfu (an A100 in bfloat16)")


def check(settings: TrainSettings) -> TrainSettings:
    """Return `settings`. Raises: UserError for values that cannot work, before anything starts."""
    config.one_of(settings, "init_from", ("auto", "scratch", "resume"))
    config.one_of(settings, "dtype", ("auto", "float32", "bfloat16", "float16"))
    config.check_common(settings)
    config.at_least(settings, "sample_tokens", 0)
    config.need(settings, "plot", "matplotlib", "examples")
    config.need(settings, "tensorboard", "tensorboard", "examples")
    return settings


class Ranks(NamedTuple):
    """Who we are among how many, and where our tensors live."""

    rank: int
    world: int
    device: torch.device
    distributed: bool


def join(settings: CommonSettings) -> Ranks:
    """Meet the other ranks, if a launcher started us as one of several."""
    device = choose(settings.device)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1, device, distributed=False)
    dist.init_process_group(backend=settings.backend)
    return Ranks(dist.get_rank(), dist.get_world_size(), device, distributed=True)


def learning_rate(iteration: int, settings: TrainSettings) -> float:
    """Linear warm-up, then a cosine from the peak down to min_lr, where it stays."""
    if iteration < settings.warmup_iters:
        return settings.learning_rate * (iteration + 1) / (settings.warmup_iters + 1)
    if not settings.decay_lr:
        return settings.learning_rate
    end = settings.lr_decay_iters or settings.max_iters
    if iteration >= end:
        return settings.min_lr
    progress = (iteration - settings.warmup_iters) / (end - settings.warmup_iters)
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + height * (settings.learning_rate - settings.min_lr)


class Trainer:
    """Network, optimizer and iteration of one rank.

    Nothing random is carried from one iteration to the next: batches and dropout of an iteration
    follow from (seed, rank, iteration) alone. So a resumed run repeats an uninterrupted one bit for
    bit, on every rank, although only rank 0 writes a checkpoint.
    """

    def __init__(self, settings: TrainSettings, corpus: Corpus, ranks: Ranks, shard: bool = False):
        if shard and settings.compile:
            raise UserError("train_fsdp.py does not compile: --compile=False")
        self.settings, self.corpus, self.ranks = settings, corpus, ranks
        #: Each rank has a part of every weight, so that all of them evaluate and save together.
        self.sharded = shard and ranks.distributed
        self.iteration, self.best_val_loss = 0, math.inf
        self.micro_steps, rest = divmod(settings.gradient_accumulation_steps, ranks.world)
        if rest or not self.micro_steps:
            raise UserError(
                f"--gradient_accumulation_steps={settings.gradient_accumulation_steps} cannot be "
                f"shared by {ranks.world} ranks: it must be a multiple of {ranks.world}"
            )
        torch.manual_seed(settings.seed + ranks.rank)
        shape = {name: getattr(settings, name) for name in MODEL_KEYS}
        shape |= {"vocab_size": len(corpus.chars), "dropout": settings.dropout}
        self.core = GPT(GPTConfig(**shape)).to(ranks.device)
        betas = (settings.beta1, settings.beta2)
        self.optimizer = self.core.configure_optimizers(
            settings.weight_decay, settings.learning_rate, betas
        )
        self.dtype = precision(settings.dtype, ranks.device)
        half = self.dtype == "float16"  # the only type whose gradients vanish without scaling
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=half)
        self.restore()
        self.net = torch.compile(self.core) if settings.compile else self.core
        self.model = self.net  # that, or what wraps it
        self.snapshots: Snapshots | None = None  # from resume() on

    def restore(self) -> None:
        """Take up the checkpoint, as init_from says. Raises: UserError."""
        settings, folder = self.settings, Path(self.settings.out_dir)
        if settings.init_from == "scratch":
            return
        state = checkpoint.load(folder, self.ranks.device)
        if state is None:
            if settings.init_from == "resume":
                raise UserError(f"--init_from=resume: there is no checkpoint in {folder}")
            return
        same = {name: getattr(settings, name) for name in MODEL_KEYS}
        checkpoint.check_same(state, same, self.corpus.chars, folder)
        self.core.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.iteration, self.best_val_loss = state["iter"], state["best_val_loss"]

    def wrap(self) -> None:
        """From now on gradients are averaged over all ranks."""
        if self.sharded:
            import sharded  # here, since FSDP takes a while to import

            # Ranks seed themselves apart, so that they begin with rank 0's weights, as under DDP.
            device = self.ranks.device
            self.model = sharded.wrap(
                self.core, self.optimizer, sync_module_states=True, device_id=device
            )
            self.scaler = sharded.same_scaler(self.scaler, device)
        else:
            index = [self.ranks.device.index] if self.ranks.device.type == "cuda" else None
            self.model = DDP(self.net, device_ids=index)

    def state(self) -> dict:
        """What a checkpoint holds: whole tensors. A collective of all ranks if they are sharded."""
        if self.sharded:
            import sharded

            weights, moments = self.model.state_dict(), sharded.moments(self.model, self.optimizer)
        else:
            weights, moments = self.core.state_dict(), self.optimizer.state_dict()
        return {
            "iter": self.iteration,
            "model": weights,
            "optimizer": moments,
            "scaler": self.scaler.state_dict(),
            "best_val_loss": self.best_val_loss,
            "model_config": asdict(self.core.config),
            "chars": self.corpus.chars,
        }

    def resume(self) -> None:
        """Go on from a snapshot that a start before this one has left, if it is newer than the
        checkpoint. Behind wrap(): each rank takes what it owns."""
        settings, folder = self.settings, Path(self.settings.out_dir) / "snapshots"
        self.snapshots = Snapshots(folder, settings.snapshot_every, settings.snapshot_storage)
        if settings.init_from == "scratch" or not self.snapshots.is_newer_than(self.iteration):
            return
        extra = self.snapshots.load(self.model, self.optimizer, scaler=self.scaler)
        if extra["chars"] != self.corpus.chars:
            raise UserError(
                f"the snapshots in {folder} are of a text with other characters; use "
                "--init_from=scratch or another --out_dir"
            )
        self.iteration, self.best_val_loss = extra["iter"], extra["best_val_loss"]

    def take_snapshot(self) -> None:
        extra = {"iter": self.iteration, "best_val_loss": self.best_val_loss}
        extra["chars"] = self.corpus.chars
        self.snapshots.save(self.iteration, extra, self.model, self.optimizer, scaler=self.scaler)

    def save(self) -> None:
        """Write the checkpoint. Raises: UserError (the disk is full, ...)."""
        state = self.state()
        if self.ranks.rank == 0:
            checkpoint.save(Path(self.settings.out_dir), state)

    def step(self, rate: float) -> torch.Tensor:
        """Do one iteration; return this rank's mean loss."""
        settings, ranks, loss_sum = self.settings, self.ranks, 0.0
        # Dropout of this rank and iteration.
        entropy = np.random.SeedSequence((settings.seed + ranks.rank, self.iteration))
        torch.manual_seed(int(entropy.generate_state(1)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for micro_step in range(self.micro_steps):
            # The gradients of all micro-steps are summed here and reduced with the last one.
            last = micro_step == self.micro_steps - 1
            reducing = last or not ranks.distributed
            with contextlib.nullcontext() if reducing else self.model.no_sync():
                place = ranks.rank * self.micro_steps + micro_step  # in the global batch
                draw = (0, settings.seed, self.iteration, place)
                loss = self.loss(self.model, "train", draw) / self.micro_steps
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
        # DDP's network is used without its wrapper, so that rank 0 talks to no other rank.
        model = self.model if self.sharded else self.net
        self.core.eval()
        means = {}
        for split in SPLITS:
            draws = ((1, self.settings.seed, k) for k in range(self.settings.eval_iters))
            losses = [self.loss(model, split, draw) for draw in draws]
            means[f"{split}_loss"] = torch.stack(losses).mean().item()
        self.core.train()
        self.best_val_loss = min(self.best_val_loss, means["val_loss"])
        return means

    def loss(self, model, split: str, draw: tuple) -> torch.Tensor:
        device = self.ranks.device
        x, y = self.corpus.batch(split, draw, self.settings.batch_size, device)
        if self.dtype == "float32":
            return model(x, y)[1]
        with torch.autocast(device.type, getattr(torch, self.dtype)):
            return model(x, y)[1]


def largest(values: list[int], ranks: Ranks) -> list[int]:
    """The largest of each value over all ranks."""
    if not ranks.distributed:
        return values
    tensor = torch.tensor(values, device=ranks.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def agree_on_start(trainer: Trainer) -> None:
    """Ranks that start at different iterations would wait for each other in vain at the end."""
    start, out_dir = trainer.iteration, trainer.settings.out_dir
    high, low = largest([start, -start], trainer.ranks)
    if high != -low:
        raise UserError(
            f"rank {trainer.ranks.rank} starts at iteration {start}, the ranks between {-low} and "
            f"{high}: --out_dir={out_dir} must be one folder that all of them see"
        )


def asked_to_stop(trainer: Trainer, stop: StopSignal) -> bool:
    """Whether any rank has had a signal: all must leave at the same iteration."""
    settings, ranks = trainer.settings, trainer.ranks
    if ranks.device.type == "cuda" and trainer.iteration % settings.log_interval:
        return False  # asking makes the GPU wait, so it is done only where logging waits anyway
    signum = largest([stop.signum], ranks)[0]
    stop.signum = signum or stop.signum
    return signum != 0


def time_to_save(trainer: Trainer, wish: bool) -> bool:
    """Rank 0 decides. The others need not know, unless each has a part of the weights."""
    if not trainer.sharded:
        return wish and trainer.ranks.rank == 0
    told = torch.tensor([int(wish)])
    dist.broadcast(told, src=0)
    return bool(told)


def train(trainer: Trainer, last: int, stop: StopSignal, report: Report) -> None:
    """Iterate until `last` or until a rank has been asked to stop."""
    settings, saved_at = trainer.settings, time.monotonic()
    while not asked_to_stop(trainer, stop):
        iteration, done = trainer.iteration, trainer.iteration == last
        rate = learning_rate(iteration, settings)
        with report.watch.paused():
            due = done or iteration % settings.eval_interval == 0
            if due and (trainer.ranks.rank == 0 or trainer.sharded):
                report.evaluated(iteration, trainer.evaluate())
            overdue = time.monotonic() - saved_at >= settings.checkpoint_seconds
            if time_to_save(trainer, done or overdue):
                trainer.save()
                saved_at = time.monotonic()
        if done:
            report.done(iteration, rate)
            return
        loss = trainer.step(rate)
        report.stepped(iteration, rate, loss)
        trainer.take_snapshot()
    trainer.save()


def last_iteration(trainer: Trainer) -> int:
    stretch = trainer.settings.max_iters
    if trainer.settings.extend:
        return (trainer.iteration // stretch + 1) * stretch
    return max(stretch, trainer.iteration)


def run(settings: TrainSettings, shard: bool) -> int:
    out = Path(settings.out_dir)
    # The text comes first: if it is no good, no rank has to wait for another one.
    folder = prepare(settings.data, Path(settings.data_dir or out / "data"), settings.corpus_mib)
    corpus = Corpus(folder, settings.block_size)
    ranks = join(settings)
    with StopSignal() as stop:
        trainer = Trainer(settings, corpus, ranks, shard)
        agree_on_start(trainer)
        if ranks.distributed:
            trainer.wrap()
        trainer.resume()
        last = last_iteration(trainer)
        with Report(trainer, last) as report:
            try:
                train(trainer, last, stop, report)
            except RuntimeError:
                if not stop.signum or trainer.sharded:
                    raise
                # The rank whose absence this error reports was asked to stop too, and was quicker.
                # The weights are those of the last whole iteration.
                stop.alone = True
                trainer.save()
        trainer.snapshots.close()  # the checkpoint is newer
        if ranks.distributed and not stop.alone:
            dist.destroy_process_group()
    stopped = trainer.iteration < last
    if ranks.rank == 0 and stopped:
        print(
            f"stopped by {stop.name()} at iteration {trainer.iteration} of {last}; saved, so the "
            f"same command goes on from there"
        )
    elif ranks.rank == 0:
        leave(settings, ranks)
    return 128 + stop.signum if stopped else 0


def leave(settings: TrainSettings, ranks: Ranks) -> None:
    """What a complete run leaves beside its checkpoint."""
    out = Path(settings.out_dir)
    try:
        if settings.plot:
            print(f"loss curve: {plot(out)}")
        if settings.sample_tokens:
            text = write_sample(out, settings.sample_tokens, ranks.device)
            print(f"sample ({out / 'sample.txt'}):\n{text}\n")
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror}") from error


def main(arguments: list[str], shard: bool = False) -> int:
    settings = check(parse(TrainSettings, arguments))
    if os.environ.get("RANK", "0") != "0":
        return run(settings, shard)
    with checkpoint.claim(Path(settings.out_dir)):
        return run(settings, shard)


if __name__ == "__main__":
    sys.exit(run_script(main, "train.py"))
