"""Trains GPT-2, pretrained or from random weights, sharded over the ranks (FSDP).

    python train_fsdp.py --n_layer=2                                          # one process
    libddp run --nproc-per-node=2 train_fsdp.py --activation_checkpointing=Block
    torchrun --nproc-per-node=8 train_fsdp.py --hf_model gpt2-xl --mixed_precision bf16

`--help` lists the keys; convert.py makes the data. Ctrl-C or SIGTERM saves and stops; the same
command then goes on, also on another number of ranks.
"""

import contextlib
import os
import sys
from pathlib import Path

import engine
import shards
import torch
from fsdp_report import Report
from fsdp_trainer import FsdpTrainer, meet
from libddp.distributed import destroy_process_group
from options import Options, check
from shared import (
    GPT,
    GPTConfig,
    StopSignal,
    UserError,
    claim,
    parse,
    run_script,
)
from tokens import Tokens
from weights import HUB, pretrained


def main(arguments: list[str]) -> int:
    options = check(parse(Options, arguments))
    if os.environ.get("RANK", "0") != "0":
        return run(options)
    with claim(Path(options.out_dir)):
        return run(options)


def run(options: Options) -> int:
    # What can be wrong without the other ranks comes first: nobody has to wait for anybody.
    names = engine.load(options.engine)
    corpus = Tokens(Path(options.data_dir))
    corpus.check(options.block_size)
    net = network(options, corpus)
    ranks = meet(options)
    with StopSignal() as stop:
        trainer = FsdpTrainer(options, corpus, ranks, names, net)
        shards.restore(trainer)
        shards.resume(trainer)
        last = max(options.max_iters, trainer.iteration)
        with Report(trainer, last) if ranks.rank == 0 else contextlib.nullcontext() as report:
            train(trainer, stop, last, report)
        trainer.snapshots.close()  # the checkpoint is newer
    destroy_process_group()
    return 128 + stop.signum if trainer.iteration < last else 0


def network(options: Options, corpus: Tokens) -> GPT:
    """The whole network, on the host. Every rank makes the same one. Raises: UserError."""
    if options.hf_model in HUB and corpus.meta["tokenizer"]["kind"] == "learned BPE":
        raise UserError(
            f"--data_dir={options.data_dir}: its tokenizer was learned from the text, and "
            f"{options.hf_model} knows only its own; convert with --tokenizer=gpt2"
        )
    if options.hf_model:
        net = pretrained(options.hf_model, options.block_size, options.dropout)
    else:
        torch.manual_seed(options.seed)
        net = GPT(
            GPTConfig(
                vocab_size=options.vocab_size or corpus.vocab_size,
                block_size=options.block_size,
                n_layer=options.n_layer,
                n_head=options.n_head,
                n_embd=options.n_embd,
                dropout=options.dropout,
                bias=options.bias,
                gelu="tanh",
            )
        )
    if net.config.vocab_size < corpus.vocab_size:
        raise UserError(
            f"the data has {corpus.vocab_size} different tokens, the network "
            f"{net.config.vocab_size}: convert the text with the network's own tokenizer"
        )
    return net


def train(trainer: FsdpTrainer, stop: StopSignal, last: int, report: Report | None) -> None:
    """Iterate until `last` or until a rank has been asked to stop. Rank 0 brings a report."""
    options = trainer.options
    while True:
        iteration = trainer.iteration
        if iteration == last or iteration % options.eval_interval == 0:
            with paused(report):
                value = trainer.evaluate()
            if report:
                report.evaluated(iteration, value)
        if iteration == last:
            break
        loss = trainer.step()
        if told(trainer, stop, iteration, loss, report):
            break
        shards.keep(trainer)  # behind the words about it, which a restart does not say again
        if trainer.iteration % options.save_interval == 0 and trainer.iteration < last:
            with paused(report):
                shards.store(trainer)
    if trainer.saved_at != trainer.iteration:
        shards.store(trainer)
    if report:
        report.close(stop)


def paused(report: Report | None):
    """Time that does not count as training."""
    return report.watch.paused() if report else contextlib.nullcontext()


def told(trainer: FsdpTrainer, stop: StopSignal, iteration: int, loss, report) -> bool:
    """Exchange losses, memory and signals where due; return whether any rank was asked to stop."""
    due = iteration % trainer.options.log_interval == 0
    if report:
        report.lap()
    if not due and trainer.ranks.device.type == "cuda":
        return False  # asking makes the GPU wait, so it is done only where logging waits anyway
    losses, memory, signals = trainer.gather(
        [loss.item(), trainer.memory_mib(), float(stop.signum)]
    ).unbind(1)
    stop.signum = int(signals.max())
    if report and (due or stop.signum or report.waiting()):
        report.log(iteration, losses.mean().item(), memory.tolist())
    return stop.signum != 0


if __name__ == "__main__":
    sys.exit(run_script(main, "train_fsdp.py"))
