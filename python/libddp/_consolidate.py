"""libddp consolidate out/snapshot model.safetensors: one file of a sharded checkpoint's model.

Reads what save_snapshot or torch.distributed.checkpoint.save has written, on any number of ranks,
tensor by tensor, in one process without a group. Exit status: 0, 1 for wrong input.
"""

from __future__ import annotations

import argparse
import sys

from libddp.errors import ArgumentError, SnapshotError
from libddp.plan.sizes import show_bytes


def run(chosen: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    try:
        number = _consolidate(chosen)
    except (ArgumentError, SnapshotError, OSError) as error:
        print(f"libddp consolidate: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.output}: {number} tensors, {show_bytes(chosen.output.stat().st_size)}")
    return 0


def _consolidate(chosen: argparse.Namespace) -> int:
    from libddp.distributed.fsdp import consolidate

    if not chosen.checkpoint.is_dir():
        raise ArgumentError(
            f"{chosen.checkpoint} is no folder. Hint: pass the one that save_snapshot wrote, not a "
            "file in it."
        )
    if chosen.output.is_dir():
        raise ArgumentError(f"{chosen.output} is a folder. Hint: name the file in it.")
    if chosen.output.exists() and not chosen.force:
        raise ArgumentError(
            f"{chosen.output} is there already. Hint: choose another name, or pass --force."
        )
    return consolidate(chosen.checkpoint, chosen.output, chosen.prefix)
