"""What the ranks have written into steps.jsonl, and what an event has cost.

record = Record(Path("out/elastic"))
event = record.event("a worker is killed")
...                                        # until a new start has done a step
cost = record.cost_of(event)
cost.seconds, cost.lost, cost.repeated, cost.equal
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

STEPS = "steps.jsonl"


@dataclass(frozen=True)
class Line:
    """A step that one rank has done.

    `start`: the same on all ranks that have met each other. `losses`: of its parts, as float.hex()
    has them.
    """

    time: float
    start: int
    pid: int
    rank: int
    world: int
    step: int
    losses: dict[str, str]


@dataclass(frozen=True)
class Event:
    """`starts`: that had done a step before it."""

    name: str
    time: float
    starts: frozenset[int]


@dataclass(frozen=True)
class Cost:
    """What was lost by it.

    `seconds`: from the event to the first step of the new start; `pause`: of them, those since the
    last step before. `repeated`: losses of parts that were computed before and again; `equal`: bit
    for bit.
    """

    event: str
    at: float
    seconds: float
    pause: float
    step: int
    ranks: int
    lost: int
    repeated: int
    equal: bool


class Record:
    """Thread rule: one thread. Reads on where it has stopped."""

    def __init__(self, out: Path):
        self._path, self._read, self.lines = out / STEPS, 0, []

    def refresh(self) -> list[Line]:
        """All whole lines so far, in the order of their writing."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._read)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read += len(text)
            self.lines += [Line(**json.loads(line)) for line in text.splitlines()]
        return self.lines

    def event(self, name: str) -> Event:
        """It is about to happen."""
        starts = frozenset(line.start for line in self.refresh())
        return Event(name, time.monotonic(), starts)

    def newest(self, rank: int) -> Line:
        """The last step of that rank."""
        return [line for line in self.refresh() if line.rank == rank][-1]

    def since(self, event: Event) -> list[Line]:
        """Steps by a start that was not there before the event."""
        return [line for line in self.refresh() if line.start not in event.starts]

    def cost_of(self, event: Event) -> Cost:
        """Once a new start has done a step."""
        after = self.since(event)
        before = [line for line in self.lines if line.start in event.starts]
        first = min(after, key=lambda line: line.time)
        known, again = losses(before), losses(after)
        repeated = known.keys() & again.keys()
        return Cost(
            event=event.name,
            at=event.time,
            seconds=first.time - event.time,
            pause=first.time - max(line.time for line in before),
            step=first.step,
            ranks=first.world,
            lost=max(line.step for line in before) - first.step + 1,
            repeated=len(repeated),
            equal=all(len(known[key] | again[key]) == 1 for key in repeated),
        )


def losses(lines: list[Line]) -> dict[tuple[int, str], set[str]]:
    """Of each step and part."""
    found: dict[tuple[int, str], set[str]] = {}
    for line in lines:
        for part, loss in line.losses.items():
            found.setdefault((line.step, part), set()).add(loss)
    return found


def curve(lines: list[Line]) -> list[tuple[float, int, float]]:
    """(time, ranks, mean loss) of each step in each start, when its first rank had done it."""
    steps: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        steps.setdefault((line.start, line.step), []).append(line)
    points = []
    for ranks in steps.values():
        values = [float.fromhex(loss) for line in ranks for loss in line.losses.values()]
        points.append((ranks[0].time, ranks[0].world, sum(values) / len(values)))
    return points
