"""Everything rank 0 tells while it trains: lines, metrics.jsonl, TensorBoard.

with Report(trainer, last) as report:
    report.log(iteration, mean_loss, memory_of_each_rank)
"""

from pathlib import Path

from fsdp_trainer import FsdpTrainer
from shared import Metrics, Progress, StopSignal, Stopwatch


class Report:
    """Thread rule: one thread, of rank 0."""

    def __init__(self, trainer: FsdpTrainer, last: int):
        options, first = trainer.options, trainer.iteration
        self._trainer, self._last = trainer, last
        self._metrics = Metrics(Path(options.out_dir), first, options.tensorboard)
        self._progress = Progress(first, last)
        self._value: float | None = None
        self.watch = Stopwatch()

    def __enter__(self) -> "Report":
        trainer, options = self._trainer, self._trainer.options
        data = trainer.corpus.meta
        self.say(
            f"data: {data['origin']['source']}, {data['train_tokens']} tokens of a "
            f"{data['tokenizer']['kind']} tokenizer"
        )
        self.say(
            f"model: {trainer.num_params / 1e6:.2f} M parameters, {options.hf_model or 'random'} "
            f"weights, {options.mixed_precision}"
        )
        self.say(
            f"ranks: {trainer.ranks.world} on {trainer.ranks.device.type}, "
            f"{options.sharding_strategy} by {options.engine}, "
            f"{trainer.tokens_per_iteration} tokens each iteration"
        )
        first = trainer.iteration
        begin = f"resuming at iteration {first}" if first else "training from the start"
        self.say(f"{begin}, to iteration {self._last}")
        return self

    def __exit__(self, *_) -> None:
        self._progress.close()
        self._metrics.close()

    def say(self, text: str) -> None:
        self._progress.say(text)

    def lap(self) -> None:
        """An iteration is done."""
        self.watch.lap()
        self._progress.advance()

    def evaluated(self, iteration: int, value: float) -> None:
        """The value is written with the next logged iteration, or at the end by itself."""
        self._value = value
        self.say(f"iter {iteration}: val loss {value:.4f}")

    def waiting(self) -> bool:
        """Whether an evaluation waits to be written with the loss of its iteration."""
        return self._value is not None

    def log(self, iteration: int, loss: float, memory_mib: list[float]) -> None:
        seconds, tokens = self.watch.mean(), self._trainer.tokens_per_iteration
        rate = tokens / seconds
        self.say(
            f"iter {iteration}: loss {loss:.4f}, {1000 * seconds:.1f} ms, {rate:,.0f} tokens/s, "
            f"peak memory {max(memory_mib):.0f} MiB a rank"
        )
        known = {f"memory_mib/{rank}": round(mib, 1) for rank, mib in enumerate(memory_mib)}
        known |= {"loss": loss, "lr": self._trainer.rate}
        known |= {"ms": round(1000 * seconds, 3), "tokens_per_second": round(rate, 1)}
        self._write(iteration, known | {"tokens": (iteration + 1) * tokens})

    def close(self, stop: StopSignal) -> None:
        """The last words; the last checkpoint is written."""
        trainer, out = self._trainer, self._trainer.options.out_dir
        if trainer.iteration < self._last:
            self.say(
                f"stopped by {stop.name()} at iteration {trainer.iteration} of {self._last}; saved "
                f"in {out}, so the same command goes on from there"
            )
            return
        if self._value is not None:
            self.say(f"done: val loss {self._value:.4f}, saved in {out}")
            tokens = trainer.iteration * trainer.tokens_per_iteration
            self._write(trainer.iteration, {"tokens": tokens})

    def _write(self, iteration: int, known: dict) -> None:
        """One line with all fields; None for what is not known."""
        memory = (f"memory_mib/{rank}" for rank in range(self._trainer.ranks.world))
        fields = ("iter", "loss", "lr", "ms", "tokens_per_second", *memory, "val_loss", "tokens")
        record = dict.fromkeys(fields) | {"iter": iteration, "val_loss": self._value} | known
        self._metrics.write(record)
        self._value = None
