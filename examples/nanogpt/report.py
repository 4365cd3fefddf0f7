"""Everything rank 0 tells while it trains: log lines, metrics file, checkpoint timing.

with Report(trainer, last) as report:
    report.before(iteration)           # evaluates and saves when due
    report.after(iteration, loss)      # logs when due
"""

import time
from pathlib import Path

import resume
from config import UserError
from metrics import Metrics
from plot import plot
from progress import Progress, Stopwatch
from sample import continue_text
from schedule import learning_rate
from settings import SampleSettings, TrainSettings
from stop import StopSignal
from trainer import Trainer


class Report:
    """Thread rule: one thread, of rank 0."""

    def __init__(self, trainer: Trainer, last: int):
        settings, first = trainer.settings, trainer.iteration
        self._settings, self._trainer, self._last = settings, trainer, last
        self._baseline = trainer.corpus.unigram_baseline()
        self._metrics = Metrics(Path(settings.out_dir), first, settings.tensorboard)
        self._progress = Progress(first, last)
        self._watch = Stopwatch()
        self._saved_at = time.monotonic()
        self._seconds: float | None = None
        self._evaluated: dict = {}

    def __enter__(self) -> "Report":
        size, ranks = self._trainer.core.num_params(), self._trainer.ranks
        tokens = self._trainer.tokens_per_iteration
        self.say(f"corpus: {self._trainer.corpus.source}")
        self.say(
            f"model: {size / 1e6:.2f} M parameters on {ranks.device.type}, ranks: {ranks.world}"
        )
        self.say(f"each iteration: {tokens} characters; unigram baseline: {self._baseline:.4f}")
        return self

    def __exit__(self, *_) -> None:
        self._progress.close()
        self._metrics.close()

    def say(self, text: str) -> None:
        self._progress.say(text)

    def before(self, iteration: int) -> None:
        """Evaluate and save, each if its time has come."""
        with self._watch.paused():
            at_end = iteration == self._last
            if at_end or iteration % self._settings.eval_interval == 0:
                self._evaluate(iteration)
            age = time.monotonic() - self._saved_at
            if self._trainer.agree(at_end or age >= self._settings.checkpoint_seconds):
                self.save()
            if at_end:
                self._write(iteration, self._evaluated["train_loss"])
                self.say(f"done: {self.summary()}")

    def after(self, iteration: int, loss) -> None:
        """Count the iteration, and log it if due. `loss` is a tensor: reading it may wait."""
        self._watch.lap()
        self._progress.advance()
        if iteration % self._settings.log_interval and not self._evaluated:
            return
        record = self._write(iteration, loss.item())
        speed = {name: record[name] for name in ("tokens_per_second", "mfu")}
        self._progress.log(iteration, record["loss"], self._seconds, **speed)

    def save(self) -> None:
        resume.store(self._trainer)
        self._saved_at = time.monotonic()

    def summary(self) -> str:
        value = self._trainer.val_loss
        return f"val loss {value:.4f} (unigram baseline {self._baseline:.4f})"

    def _evaluate(self, iteration: int) -> None:
        self._evaluated = self._trainer.evaluate()
        train_loss = self._evaluated["train_loss"]
        self.say(f"iter {iteration}: {self.summary()}, train loss {train_loss:.4f}")

    def _write(self, iteration: int, loss: float) -> dict:
        """One line with all fields; None where there is no number."""
        trainer, tokens = self._trainer, self._trainer.tokens_per_iteration
        self._seconds = seconds = self._watch.mean() or self._seconds
        record = {
            "iter": iteration,
            "loss": loss,
            "lr": learning_rate(iteration, self._settings),
            "ms": round(1000 * seconds, 3) if seconds else None,
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
            "mfu": trainer.mfu(seconds) if seconds else None,
            "tokens": trainer.iteration * tokens,
            "train_loss": self._evaluated.get("train_loss"),
            "val_loss": self._evaluated.get("val_loss"),
            "unigram_baseline": self._baseline,
        }
        self._metrics.write(record)
        self._evaluated = {}
        return record


def opening(settings: TrainSettings, first: int, last: int) -> str:
    """The line that says where the run begins and why."""
    if not first:
        return f"training from scratch to iteration {last}"
    if first == last:
        return f"{settings.out_dir} is complete at iteration {last}; --extend=True trains on"
    if first % settings.max_iters == 0:
        return f"{settings.out_dir} was complete at iteration {first}: training on to {last}"
    return f"resuming {settings.out_dir} at iteration {first}, training to {last}"


def finish(trainer: Trainer, stop: StopSignal, last: int) -> None:
    """What rank 0 leaves behind."""
    settings, out = trainer.settings, Path(trainer.settings.out_dir)
    if trainer.iteration < last:
        print(
            f"stopped by {stop.name()} at iteration {trainer.iteration} of {last}; saved, so the "
            f"same command goes on from there"
        )
        return
    try:
        if settings.plot:
            print(f"loss curve: {plot(out)}")
        if settings.sample_tokens:
            text = write_sample(trainer, out / "sample.txt")
            print(f"sample ({out / 'sample.txt'}):\n{text}\n")
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror}") from error


def write_sample(trainer: Trainer, path: Path) -> str:
    chars = trainer.corpus.chars
    request = SampleSettings(
        start="\n" if "\n" in chars else chars[0],
        max_new_tokens=trainer.settings.sample_tokens,
    )
    text = continue_text(trainer.whole_core(), chars, request)
    path.write_text(text, encoding="utf-8")
    return text
