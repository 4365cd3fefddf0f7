"""Trains a small character-level GPT with libddp, alone or on any number of ranks.

    python train.py --n_layer=2                                       # one process
    libddp run --nproc-per-node=2 train.py --max_iters=1000           # two ranks
    torchrun --nproc-per-node=2 train.py --config=mine.json           # the same

`--help` lists the keys. Ctrl-C or SIGTERM saves and stops; the same command then goes on. Only the
imports from libddp (here and in trainer.py) differ from a script for torch.distributed.
"""

import os
import sys
from pathlib import Path

import resume
import torch
from config import UserError, parse, run_script
from data import Corpus
from libddp.distributed import (
    ReduceOp,
    all_reduce,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)
from prepare import prepare
from report import Report, finish, opening
from settings import TrainSettings, check
from stop import StopSignal
from trainer import Ranks, Trainer


def main(arguments: list[str], make_trainer=Trainer) -> int:
    settings = check(parse(TrainSettings, arguments))
    if os.environ.get("RANK", "0") != "0":
        return run(settings, make_trainer)
    with resume.claim(Path(settings.out_dir)):
        return run(settings, make_trainer)


def run(settings: TrainSettings, make_trainer) -> int:
    # The text comes first: if it is no good, no rank has to wait for another one.
    folder = Path(settings.data_dir or Path(settings.out_dir) / "data")
    corpus = Corpus(prepare(settings.data, folder, settings.corpus_mib), settings.block_size)
    ranks = join(settings)
    with StopSignal() as stop:
        trainer = make_trainer(settings, corpus, ranks)
        resume.restore(trainer)
        agree_on_start(trainer)
        if ranks.distributed:
            trainer.wrap()
        last = last_iteration(trainer)
        if ranks.rank == 0:
            with Report(trainer, last) as report:
                report.say(opening(settings, trainer.iteration, last))
                train(trainer, stop, last, report)
        else:
            train(trainer, stop, last, trainer.follower(last))
        if ranks.distributed and not stop.alone:
            destroy_process_group()
    if ranks.rank == 0:
        finish(trainer, stop, last)
    return 128 + stop.signum if trainer.iteration < last else 0


def join(settings: TrainSettings) -> Ranks:
    """Meet the other ranks, if a launcher started us as one of several."""
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device={settings.device}: there is no such device here")
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1, device, distributed=False)
    init_process_group(backend=settings.backend)
    return Ranks(get_rank(), get_world_size(), device, distributed=True)


def largest(values: list[int], ranks: Ranks) -> list[int]:
    """The largest of each value over all ranks."""
    if not ranks.distributed:
        return values
    tensor = torch.tensor(values, device=ranks.device)
    all_reduce(tensor, op=ReduceOp.MAX)
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


def last_iteration(trainer: Trainer) -> int:
    stretch = trainer.settings.max_iters
    if trainer.settings.extend:
        return (trainer.iteration // stretch + 1) * stretch
    return max(stretch, trainer.iteration)


def train(trainer: Trainer, stop: StopSignal, last: int, report=None) -> None:
    """Iterate until `last` or until a rank has been asked to stop. Rank 0 brings a Report."""
    try:
        while not asked_to_stop(trainer, stop):
            iteration = trainer.iteration
            if report:
                report.before(iteration)
            if iteration == last:
                return
            loss = trainer.step()
            if report:
                report.after(iteration, loss)
    except RuntimeError:
        if not stop.signum or trainer.saves_together:
            raise
        # The rank whose absence this error reports was asked to stop too, and was quicker. The
        # weights are those of the last whole iteration.
        stop.alone = True
    if report:
        report.save()


def asked_to_stop(trainer: Trainer, stop: StopSignal) -> bool:
    """Whether any rank has had a signal: all must leave at the same iteration."""
    settings, ranks = trainer.settings, trainer.ranks
    if ranks.device.type == "cuda" and trainer.iteration % settings.log_interval:
        return False  # asking makes the GPU wait, so it is done only where logging waits anyway
    signum = largest([stop.signum], ranks)[0]
    stop.signum = signum or stop.signum
    return signum != 0


if __name__ == "__main__":
    sys.exit(run_script(main, "train.py"))
