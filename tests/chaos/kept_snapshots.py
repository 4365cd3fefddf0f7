"""What a process of its own finds in a folder of snapshots.

found = load_alone(forks, folder, {"width": 32})
found["step"], found["error"], found["warnings"], found["digest"]
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import struct
from pathlib import Path

import torch
import train
from forked import Forks

import libddp


def load_alone(forks: Forks, folder: Path, config: dict) -> dict:
    """Loads the newest that it takes, with one rank and no group."""
    result = folder.parent / f"{folder.name}-found.json"
    argument = {"folder": str(folder), "result": str(result), "config": config}
    pid = forks.start("kept_snapshots:_load", argument, {}, folder.parent / "output.txt")
    status = forks.wait(pid, 60)
    assert status == 0, f"{status}: {(folder.parent / 'output.txt').read_text()[-3000:]}"
    return json.loads(result.read_text())


def flip_bits(forks: Forks, folder: Path, config: dict, flips: int, seed: str) -> list[dict]:
    """Of a folder with two snapshots; one dictionary each (Flips.one)."""
    scratch = folder.parent / "flips"
    scratch.mkdir()
    result = scratch / "result.json"
    argument = {"folder": str(folder), "scratch": str(scratch), "config": config, "flips": flips}
    output = folder.parent / "output.txt"
    argument |= {"seed": seed, "result": str(result)}
    status = forks.wait(forks.start("kept_snapshots:_flip", argument, {}, output), 120)
    assert status == 0, f"{status}: {output.read_text()[-3000:]}"
    return json.loads(result.read_text())


def memories_of(pid: int) -> dict[int, Path]:
    """Memory files that a process has open, by their numbers."""
    found = {}
    for path in sorted(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            if os.readlink(path).startswith("/memfd:"):
                found[path.stat().st_ino] = path
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def rank_of_memory(path: Path) -> int:
    """Whose it is, as its header says (libddp/slots/slot_memory.cpp)."""
    return struct.unpack("<i", path.read_bytes()[12:16])[0]


def flip_byte(numbers: random.Random, paths: list[Path]) -> int:
    """A bit of a byte of one of them that is used; returns where it is."""
    path = numbers.choice(paths)
    with open(path, "r+b", buffering=0) as memory:
        size = os.fstat(memory.fileno()).st_size
        # Holes between the parts are no bytes of anything.
        used = [o for o in range(0, size, 512) if any(os.pread(memory.fileno(), 512, o))]
        offset = numbers.choice([512 * 0, 512 * 1, *used]) + numbers.randrange(512)
        (byte,) = os.pread(memory.fileno(), 1, offset)
        os.pwrite(memory.fileno(), bytes([byte ^ 1 << numbers.randrange(8)]), offset)
    return offset


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
        snapshot = libddp.Snapshot(folder, random=False, linger=1)
        found = {"step": 0, "error": "", "digest": ""}
        try:
            extra = snapshot.load(model, optimizer, schedule=schedule)
            found["step"] = extra.get("step", 0)
            found["digest"] = _digest([model.state_dict(), optimizer.state_dict(), extra])
        except Exception as error:  # also of types that it should not raise
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


class Flips:
    """Copies of a folder with one bit that is another one, and what a load makes of them."""

    def __init__(self, folder: Path, scratch: Path, config: dict, seed: str) -> None:
        self._folder, self._scratch = folder, scratch
        self._loader = Loader(config)
        self._random = random.Random(seed)
        snapshots = sorted(folder.glob("step-*"), key=lambda p: int(p.name.split(".")[1]))
        self._older, self._newest = snapshots[-2:]
        self._whole = self._load("whole")
        self._fallback = self._load("older", without=self._newest.name)
        if self._whole["error"] or self._fallback["error"]:
            raise RuntimeError(f"{self._whole} {self._fallback}")

    def one(self, number: int) -> dict:
        """{"fault": what was wrong with the load, "" for nothing, "outcome": newest, ...}"""
        files = [*self._newest.iterdir()] * 3 + [*self._older.iterdir(), self._folder / "run"]
        path = self._random.choice(files).relative_to(self._folder)
        size = (self._folder / path).stat().st_size
        most = size if self._random.random() < 0.5 else min(size, 600)  # headers, tables
        bit = self._random.randrange(most * 8)
        found = self._load(f"flip-{number}", flipped=(path, bit))
        return {"flip": f"{path}, bit {bit}", **found, **self._judge(found, path)}

    def _judge(self, found: dict, path: Path) -> dict:
        named = " ".join([found["error"], *found["warnings"]])
        if found["error"]:
            is_clear = found["error"].startswith("SnapshotError") and path.parts[0] in named
            return {"outcome": "refused", "fault": "" if is_clear else "an unclear error"}
        if found["digest"] == self._whole["digest"]:
            return {"outcome": "newest", "fault": ""}
        if found["digest"] != self._fallback["digest"]:
            return {"outcome": "wrong", "fault": "values that were never saved"}
        return {"outcome": "older", "fault": "" if path.parts[0] in named else "it is not named"}

    def _load(self, name: str, without: str = "", flipped: tuple | None = None) -> dict:
        copy = self._scratch / name
        shutil.copytree(self._folder, copy, ignore=shutil.ignore_patterns(without or "-"))
        if flipped:
            path, bit = copy / flipped[0], flipped[1]
            data = bytearray(path.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
        try:
            return self._loader.load(str(copy))
        finally:
            shutil.rmtree(copy)


def _flip(argument: dict) -> None:
    paths = Path(argument["folder"]), Path(argument["scratch"])
    flips = Flips(*paths, argument["config"], argument["seed"])
    results = [flips.one(number) for number in range(argument["flips"])]
    Path(argument["result"]).write_text(json.dumps(results))


def _load(argument: dict) -> None:
    found = Loader(argument["config"]).load(argument["folder"])
    Path(argument["result"]).write_text(json.dumps(found))
