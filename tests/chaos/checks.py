"""What a process of its own finds in a folder of snapshots.

found = load_alone(forks, folder, {"width": 32})
found["step"], found["error"], found["warnings"], found["digest"]
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch

import libddp
import train
from forked import Forks


def load_alone(forks: Forks, folder: Path, config: dict) -> dict:
    """Loads the newest that it takes, with one rank and no group."""
    result = folder.parent / f"{folder.name}-found.json"
    argument = {"folder": str(folder), "result": str(result), "config": config}
    pid = forks.start("checks:_load", argument, {}, folder.parent / "output.txt")
    status = forks.wait(pid, 60)
    assert status == 0, f"{status}: {(folder.parent / 'output.txt').read_text()[-3000:]}"
    return json.loads(result.read_text())


class Loader:
    """A model and an optimizer to load into, again and again."""

    def __init__(self, config: dict) -> None:
        torch.set_num_threads(1)
        self._config = train.DEFAULTS | config
        self._warnings: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._warnings.append(record.getMessage())
        logging.getLogger("libddp.snapshot").addHandler(handler)

    def load(self, folder: str) -> dict:
        """What is found; a digest of each byte that was loaded."""
        self._warnings.clear()
        model = train.build("plain", self._config["width"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        snapshot = libddp.Snapshot(folder, random=False, linger=0)
        found = {"step": 0, "error": "", "digest": ""}
        try:
            extra = snapshot.load(model, optimizer, schedule=schedule)
            found["step"] = extra.get("step", 0)
            found["digest"] = _digest([model.state_dict(), optimizer.state_dict(), extra])
        except libddp.LibddpError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        snapshot.close()
        return found | {"warnings": list(self._warnings)}


def _digest(value) -> str:
    digest = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())

    add(value)
    return digest.hexdigest()


def _load(argument: dict) -> None:
    found = Loader(argument["config"]).load(argument["folder"])
    Path(argument["result"]).write_text(json.dumps(found))
