"""What lies in which bucket: the answer of DistributedDataParallel.explain()."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MAX_NAMES = 3


@dataclass(frozen=True)
class Bucket:
    """One message of the gradient exchange."""

    index: int
    #: In the order in which their gradients lie in the bucket.
    parameters: tuple[str, ...]
    dtype: torch.dtype
    #: The gradients alone, and all that travels: with padding and flags.
    gradient_bytes: int
    total_bytes: int
    #: In memory that all ranks of the group map, so that communication copies nothing.
    in_arena: bool


@dataclass(frozen=True)
class Explanation:
    """How a wrapped model exchanges its gradients; str() of it is a table."""

    #: In the order in which they are sent.
    buckets: tuple[Bucket, ...]
    #: Parameters without a bucket: their gradients are sparse and sent after the buckets.
    sparse: tuple[str, ...]
    #: The buckets follow the order in which gradients came in the first synchronising pass; before
    #: the forward that comes after it, the reverse order of the parameters; under a
    #: communication hook, the order of the parameters, as in torch.
    rebuilt: bool
    #: Whether a communication hook gets the buckets, as torch makes them.
    hooked: bool
    rank: int
    world_size: int
    #: The arguments that decide what happens, by their name in DistributedDataParallel.
    options: dict[str, object]

    @property
    def num_parameters(self) -> int:
        """Parameter tensors that require a gradient."""
        return len(self.sparse) + sum(len(bucket.parameters) for bucket in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        """The gradients of one rank in buckets, without padding and flags."""
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    @property
    def arena_bytes(self) -> int:
        """What the buckets take of this rank's part of the shared arena."""
        return sum(bucket.total_bytes for bucket in self.buckets if bucket.in_arena)

    def __str__(self) -> str:
        first = "order of the parameters" if self.hooked else "reverse order of the parameters"
        order = "as gradients come" if self.rebuilt else first
        head = ("bucket", "params", "dtype", "gradients", "in all", "memory", "names")
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return "\n".join(
            [
                f"DistributedDataParallel on rank {self.rank} of {self.world_size}: "
                f"{self.num_parameters} parameters, {len(self.buckets)} buckets ({order})",
                f"gradients {readable(self.gradient_bytes)}, arena {readable(self.arena_bytes)}",
                options,
                *table([head, *(_row(bucket) for bucket in self.buckets)]),
                *([f"without a bucket (sparse): {', '.join(self.sparse)}"] if self.sparse else []),
            ]
        )


def explanation(layout: tuple, **rest) -> Explanation:
    """From what the C++ side tells (bindings/ddp_timeline.cpp)."""
    rebuilt, hooked, buckets, sparse = layout
    return Explanation(
        buckets=tuple(
            Bucket(index, tuple(names), dtype, gradient_bytes, total_bytes, in_arena)
            for index, (names, dtype, gradient_bytes, total_bytes, in_arena) in enumerate(buckets)
        ),
        sparse=tuple(sparse),
        rebuilt=rebuilt,
        hooked=hooked,
        **rest,
    )


def readable(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(bucket: Bucket) -> tuple[str, ...]:
    shown = bucket.parameters[:_MAX_NAMES]
    more = len(bucket.parameters) - len(shown)
    return (
        str(bucket.index),
        str(len(bucket.parameters)),
        str(bucket.dtype).removeprefix("torch."),
        readable(bucket.gradient_bytes),
        readable(bucket.total_bytes),
        "arena" if bucket.in_arena else "private",
        ", ".join(shown) + (f", and {more} more" if more else ""),
    )
