"""Ctrl-C and SIGTERM end the training between two iterations instead of in the middle of one.

with StopSignal() as stop:
    while not stop.signum:
        step()
"""

import signal
import time


class StopSignal:
    """Remembers the first signal. Thread rule: main thread (as Python's signal module asks)."""

    PATIENCE_SECONDS = 2.0

    def __init__(self):
        self.signum = 0
        self.alone = False  # set when the other ranks have left before us
        self._since = 0.0
        self._old = {}

    def __enter__(self) -> "StopSignal":
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame) -> None:
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
        # One Ctrl-C may arrive twice, from the terminal and from the launcher. A much later one is
        # a user who has lost patience.
        elif signum == signal.SIGINT and time.monotonic() - self._since > self.PATIENCE_SECONDS:
            raise KeyboardInterrupt

    def name(self) -> str:
        return signal.Signals(self.signum).name
