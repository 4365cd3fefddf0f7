"""What a run shows: a bar on a terminal, plain lines elsewhere, metrics.jsonl, TensorBoard.

    with Report(trainer, last) as report:      # silent on ranks other than 0
        with report.watch.paused():            # does not count as training
            report.evaluated(100, trainer.evaluate())
        report.stepped(100, rate, loss)        # logs if due
        report.done(600, rate)
    # iter 100: loss 2.1000, time 210.00ms, 9,752 tokens/s

A line of metrics.jsonl is one object with at least "iter", which strictly grows. A resumed run
repeats what came after its checkpoint, so those lines are taken out first.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from config import UserError

NAME = "metrics.jsonl"


class Metrics:
    """Thread rule: one thread. Used by rank 0 only."""

    def __init__(self, folder: Path, first: int, tensorboard: bool = False):
        self._path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            keep_before(self._path, first)
            # No buffer: what could not be written must not come up again in close().
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()

    def write(self, record: dict) -> None:
        """Append one line, at once: a crash loses no line that was reported. Raises: UserError."""
        rest = json.dumps(record).encode() + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error
        if self._board:
            for name, value in record.items():
                if name != "iter" and value is not None:
                    self._board.add_scalar(name, value, record["iter"])


def read_metrics(path: Path) -> list[dict]:
    """All whole lines of a metrics file. A crash may have torn the last one: it is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def keep_before(path: Path, first: int) -> None:
    """Take the lines of iteration `first` and later out of the file, in one atomic step."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["iter"] < first]
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(fresh, path)


class Progress:
    """Thread rule: one thread. A rank other than 0 passes enabled=False and stays silent."""

    def __init__(self, first: int, last: int, enabled: bool = True):
        self._enabled = enabled
        self._bar = None
        # Without tqdm a terminal gets the same plain lines as a file.
        with contextlib.suppress(ImportError):
            if enabled and sys.stderr.isatty():
                from tqdm import tqdm

                self._bar = tqdm(total=last, initial=first, unit="iter", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        if not self._enabled:
            return
        if self._bar:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def log(
        self,
        iteration: int,
        loss: float,
        seconds: float,
        tokens_per_second: float,
        mfu: float | None = None,
    ) -> None:
        speed = f"{tokens_per_second:,.0f} tokens/s"
        if mfu is not None:
            speed += f", mfu {100 * mfu:.2f}%"
        if self._bar:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {speed}", refresh=False)
        else:
            self.say(f"iter {iteration}: loss {loss:.4f}, time {1000 * seconds:.2f}ms, {speed}")

    def advance(self) -> None:
        if self._bar:
            self._bar.update()

    def close(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None


class Stopwatch:
    """Mean seconds per lap; what happens inside paused() does not count."""

    def __init__(self):
        self._restart()

    def _restart(self) -> None:
        self._began = time.perf_counter()
        self._laps = 0

    @contextlib.contextmanager
    def paused(self):
        stopped = time.perf_counter()
        yield
        self._began += time.perf_counter() - stopped

    def lap(self) -> None:
        self._laps += 1

    def mean(self) -> float | None:
        """Mean of the laps since the last call; None where there was none."""
        if not self._laps:
            return None
        mean = (time.perf_counter() - self._began) / self._laps
        self._restart()
        return mean


class Report:
    """Thread rule: one thread."""

    def __init__(self, trainer, last: int):
        self._trainer, self._last, self._settings = trainer, last, trainer.settings
        self._first, is_shown = trainer.iteration, trainer.ranks.rank == 0
        folder, board = Path(self._settings.out_dir), self._settings.tensorboard
        self._metrics = Metrics(folder, self._first, board) if is_shown else None
        self._progress = Progress(self._first, last, enabled=is_shown)
        self._baseline = trainer.corpus.unigram_baseline() if is_shown else 0.0
        self._means: dict = {}  # of an evaluation that no line of the metrics has yet
        self._seconds: float | None = None
        self.watch = Stopwatch()

    def __enter__(self) -> "Report":
        trainer, ranks = self._trainer, self._trainer.ranks
        say, size = self._progress.say, trainer.core.num_params() / 1e6
        say(f"corpus: {trainer.corpus.source}")
        where = ranks.device.type
        if where != "cpu":
            where += f" in {trainer.dtype}"
        say(f"model: {size:.2f} M parameters on {where}, ranks: {ranks.world}")
        say(f"each iteration: {self._tokens} characters; unigram baseline: {self._baseline:.4f}")
        say(self._opening())
        return self

    def __exit__(self, *_) -> None:
        self._progress.close()
        if self._metrics:
            self._metrics.close()

    def evaluated(self, iteration: int, means: dict) -> None:
        """The mean loss of each split; written with the next line of the metrics."""
        self._means = means
        text = f"{self._summary()}, train loss {means['train_loss']:.4f}"
        self._progress.say(f"iter {iteration}: {text}")

    def stepped(self, iteration: int, rate: float, loss) -> None:
        """Counts an iteration and logs it if due. `loss` is a tensor: reading it may wait."""
        self.watch.lap()
        self._progress.advance()
        if self._metrics and (iteration % self._settings.log_interval == 0 or self._means):
            record = self._write(iteration, rate, loss.item())
            speed = {name: record[name] for name in ("tokens_per_second", "mfu")}
            self._progress.log(iteration, record["loss"], self._seconds, **speed)

    def done(self, iteration: int, rate: float) -> None:
        """The last evaluation is that of a complete run."""
        if self._metrics:
            summary = self._summary()
            self._write(iteration, rate, self._means["train_loss"])
            self._progress.say(f"done: {summary}")

    @property
    def _tokens(self) -> int:
        """In one iteration of all ranks."""
        s = self._settings
        return s.gradient_accumulation_steps * s.batch_size * s.block_size

    def _mfu(self, seconds: float) -> float | None:
        """Model FLOP/s of this rank over a GPU's peak, for iterations of `seconds`; CPU: None."""
        trainer, settings = self._trainer, self._settings
        if trainer.ranks.device.type == "cpu":
            return None
        sequences = trainer.micro_steps * settings.batch_size
        return trainer.core.estimate_mfu(sequences, seconds, settings.peak_tflops * 1e12)

    def _opening(self) -> str:
        """Where the run begins and why."""
        first, last, out_dir = self._first, self._last, self._settings.out_dir
        if not first:
            return f"training from scratch to iteration {last}"
        if first == last:
            return f"{out_dir} is complete at iteration {last}; --extend=True trains on"
        if first % self._settings.max_iters == 0:
            return f"{out_dir} was complete at iteration {first}: training on to {last}"
        return f"resuming {out_dir} at iteration {first}, training to {last}"

    def _summary(self) -> str:
        return f"val loss {self._means['val_loss']:.4f} (unigram baseline {self._baseline:.4f})"

    def _write(self, iteration: int, rate: float, loss: float) -> dict:
        """One line with all fields; None where there is no number."""
        tokens = self._tokens
        self._seconds = seconds = self.watch.mean() or self._seconds
        record = {
            "iter": iteration,
            "loss": loss,
            "lr": rate,
            "ms": round(1000 * seconds, 3) if seconds else None,
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
            "mfu": self._mfu(seconds) if seconds else None,
            "tokens": self._trainer.iteration * tokens,
            "train_loss": self._means.get("train_loss"),
            "val_loss": self._means.get("val_loss"),
            "unigram_baseline": self._baseline,
        }
        self._metrics.write(record)
        self._means = {}
        return record
