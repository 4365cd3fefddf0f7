"""What the house tests look at: the tracked files of this checkout."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: room -> rooms that it may include (docs/design.md, "The house").
ROOMS = {
    "base": set(),
    "kernels": {"base"},
    "memory": {"base"},
    "transport": {"base"},
    "bootstrap": {"transport", "base"},
    "collectives": {"transport", "memory", "kernels", "base"},
    "watchdog": {"collectives", "transport", "base"},
    "rendezvous": {"bootstrap", "transport", "base"},
    "group": {"rendezvous", "watchdog", "kernels", "base"},
    "host": {
        "group",
        "rendezvous",
        "watchdog",
        "collectives",
        "bootstrap",
        "transport",
        "memory",
        "kernels",
        "base",
    },
    "cuda": {"group", "rendezvous", "watchdog", "bootstrap", "transport", "base"},
    "module": {"group", "base"},
    "autograd": {"base"},
    "ddp": {"module", "autograd", "group", "memory", "base"},
    "optim": {"ddp", "module", "group", "base"},
    "fsdp": {"module", "autograd", "group", "memory", "base"},
    "interop": {"host", "group", "rendezvous", "collectives", "kernels", "base"},
    "activation": {"autograd", "base"},
    "slots": {"memory", "kernels", "base"},
    "keeper": {"slots", "bootstrap", "transport", "kernels", "base"},
    "elastic": {"group", "transport", "base"},
    "snapshot": {
        "keeper",
        "slots",
        "group",
        "bootstrap",
        "transport",
        "memory",
        "kernels",
        "base",
    },
    "training": {"snapshot", "slots", "optim", "fsdp", "module", "group", "base"},
}
#: Rooms that know no torch.
CORE = {
    "base",
    "kernels",
    "memory",
    "transport",
    "bootstrap",
    "collectives",
    "watchdog",
    "slots",
    "keeper",
}

INCLUDE = re.compile(r'^#include [<"](libddp/([a-z_]+)/[^">]+|libddp/libddp\.h)[">]', re.M)


@cache
def tracked() -> tuple[str, ...]:
    """Paths of all files in the checkout that git does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(path for path in listing.stdout.splitlines() if (ROOT / path).is_file())


def files(*suffixes: str, under: str = "") -> list[str]:
    """Tracked files with one of the suffixes below a folder."""
    return [p for p in tracked() if p.endswith(suffixes) and p.startswith(under)]


def read(path: str) -> str:
    """Text of a tracked file."""
    return (ROOT / path).read_text(encoding="utf-8")


def room_of(path: str) -> str:
    """The room that a library file stands in."""
    return path.split("/")[1]


def includes(path: str) -> list[str]:
    """libddp headers that a C++ file includes."""
    return [match.group(1) for match in INCLUDE.finditer(read(path))]
