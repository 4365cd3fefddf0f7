"""What the user sees: a bar on a terminal, plain lines everywhere else; and the clock behind it.

progress = Progress(first=0, last=600)
progress.log(100, loss=2.1, seconds=0.21, tokens_per_second=9752.4)
# iter 100: loss 2.1000, time 210.00ms, 9,752 tokens/s
"""

import contextlib
import sys
import time


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
