"""Where libddp puts parameters and gradients: how many bytes, and which piece a rank owns. Pure.

The arithmetic of libddp/fsdp/flat_layout.h and libddp/ddp/gradient_buckets.h.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from libddp.plan.facts import Event, Parameter, Shape

#: Blocks are multiples of this many elements, gradients in buckets of this many bytes.
BLOCK_ALIGNMENT = 32
SLOT_ALIGNMENT = 64
#: Units whose averages may be under way while another one fills its buffer.
MOST_REDUCTIONS = 1

#: What a buffer is found by when it is used again: elements and bytes of an element.
Size = tuple[int, int]


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _num_rows(parameter: Parameter, ranks: int, rank: int) -> int:
    """Of dim 0, as torch.chunk divides it."""
    rows = parameter.shape[0] if parameter.shape else 1
    most = -(-rows // ranks)
    return min(most, max(0, rows - most * rank))


def _row_numel(parameter: Parameter) -> int:
    return math.prod(parameter.shape[1:])


def block_numel(parameters: Iterable[Parameter], ranks: int) -> int:
    """Elements of a rank's block of one flat array."""
    own = (_num_rows(p, ranks, 0) * _row_numel(p) for p in parameters)
    return max(BLOCK_ALIGNMENT, sum(round_up(numel, BLOCK_ALIGNMENT) for numel in own))


def whole_numel(parameters: Iterable[Parameter]) -> int:
    """Elements of one flat array."""
    return block_numel(parameters, ranks=1)


def pieces(parameters: Iterable[Parameter], ranks: int, rank: int) -> list[Shape]:
    """What `rank` owns of each parameter that it owns anything of."""
    owned = [(p, _num_rows(p, ranks, rank)) for p in parameters]
    return [(rows, *p.shape[1:]) for p, rows in owned if rows * _row_numel(p) > 0]


def even_parts(parameters: Sequence[Parameter], ranks: int, rank: int) -> list[Shape]:
    """What `rank` owns where the elements of all parameters together are divided evenly."""
    block = round_up(-(-sum(p.numel for p in parameters) // ranks), BLOCK_ALIGNMENT)
    found, start = [], 0
    for parameter in parameters:
        end = start + parameter.numel
        numel = min(end, block * (rank + 1)) - max(start, block * rank)
        if numel > 0:
            found.append((numel,))
        start = end
    return found


def flats(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """One list per flat array: parameters of one unit, one dtype, all trained or none."""
    kinds: dict[tuple, list[Parameter]] = {}
    for parameter in parameters:
        key = (parameter.unit, not parameter.trained, parameter.itemsize)
        kinds.setdefault(key, []).append(parameter)
    return [kinds[key] for key in sorted(kinds)]


def bucket_bytes(parameters: Iterable[Parameter]) -> int:
    """All gradients in buckets."""
    return sum(round_up(p.bytes, SLOT_ALIGNMENT) for p in parameters if p.trained)


class Pool:
    """Counts the buffers that units of a model take in turns, as libddp/fsdp/buffer_pool.h has
    them: one that was given back serves whoever needs the same size."""

    def __init__(self) -> None:
        self._out: Counter[Size] = Counter()
        self._made: Counter[Size] = Counter()

    def take(self, size: Size) -> None:
        self._out[size] += 1
        self._made[size] = max(self._made[size], self._out[size])

    def give(self, size: Size) -> None:
        self._out[size] -= 1

    @property
    def bytes(self) -> int:
        return sum(numel * itemsize * count for (numel, itemsize), count in self._made.items())


class Schedule:
    """Follows one pass, and takes and gives the buffers that it needs from a pool.

    `gradient_sizes`, `gathered_sizes`: per unit, of its flat arrays; nothing is gathered where a
    unit has none. What travels is as large as what it is put together to, and is given back when
    the unit is needed: of one that was prefetched not before.
    """

    def __init__(
        self,
        unit_of: Sequence[int],
        gradient_sizes: dict[int, list[Size]],
        gathered_sizes: dict[int, list[Size]],
        keep_unsharded: bool,
    ) -> None:
        self.pool = Pool()
        self._unit_of = unit_of
        self._gradients, self._gathered = gradient_sizes, gathered_sizes
        self._keep = keep_unsharded
        self._unsharded: set[int] = set()
        self._under_way: set[int] = set()
        self._order: list[int] = []
        self._filling: set[int] = set()
        self._reducing: list[int] = []

    def run(self, events: Iterable[Event], trained: Sequence[int]) -> int:
        """Bytes of all buffers; `trained`: how many gradients each unit waits for."""
        missing = list(trained)
        for event in events:
            if event.what == "forward":
                self._order += [event.which] if event.which not in self._order else []
                self._unshard(event.which)
            elif event.what == "forward_end":
                if event.which != 0 and not self._keep:
                    self._reshard(event.which)
            else:
                unit = self._unit_of[event.which]
                self._fill(unit)
                missing[unit] -= 1
                if missing[unit] == 0:
                    self._reduce(unit)
        return self.pool.bytes

    def _begin_unshard(self, unit: int) -> None:
        if unit not in self._unsharded:
            self._unsharded.add(unit)
            self._under_way.add(unit)
            for size in 2 * self._gathered.get(unit, []):
                self.pool.take(size)

    def _unshard(self, unit: int) -> None:
        self._begin_unshard(unit)
        if unit in self._under_way:
            self._under_way.remove(unit)
            for size in self._gathered.get(unit, []):
                self.pool.give(size)

    def _reshard(self, unit: int) -> None:
        if unit in self._unsharded:
            self._unsharded.remove(unit)
            for size in self._gathered.get(unit, []):
                self.pool.give(size)

    def _fill(self, unit: int) -> None:
        if unit in self._filling:
            return
        self._filling.add(unit)
        self._unshard(unit)
        before = self._order.index(unit) - 1 if unit in self._order else 0
        if before >= 1:
            self._begin_unshard(self._order[before])
        for size in self._gradients.get(unit, []):
            self.pool.take(size)

    def _reduce(self, unit: int) -> None:
        while len(self._reducing) >= MOST_REDUCTIONS:
            self._collect()
        self._reducing.append(unit)
        self._reshard(unit)

    def _collect(self) -> None:
        for size in self._gradients.get(self._reducing.pop(0), []):
            self.pool.give(size)
