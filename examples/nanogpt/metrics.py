"""Metrics as JSON lines, and as TensorBoard scalars if asked for.

    metrics = Metrics(Path("out"), first=resumed_iteration)
    metrics.write({"iter": 100, "loss": 2.1, "lr": 1e-3})
    metrics.close()

Each line is one object with at least "iter", which strictly grows. A resumed run
repeats what came after its checkpoint, so those lines are taken out first.
"""

import json
import os
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


def read(path: Path) -> list[dict]:
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
    kept = [record for record in read(path) if record["iter"] < first]
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(fresh, path)
