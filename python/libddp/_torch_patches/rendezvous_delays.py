"""What torch's launchers take for a meeting, apart from waiting for each other.

In the module of torch's dynamic rendezvous this replaces
- `_delay`: up to 0.3 s before a meeting and 1 s between looks at what the others say, which is
  right for a thousand hosts that read one entry, and most of what a restart of a few takes;
- `get_method_name`, which each event that is recorded asks for the name of a function, a dozen
  times in a meeting: torch's looks through all files and modules for it, 15 ms and more.

And it makes the last call of a meeting as long as somebody waits (await_waiting).

Nothing of it is a setting. `libddp run` asks for it, in its own process; it stays for good.
"""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, timezone

from libddp._torch_patches.replacing import LAUNCHER

#: From so many hosts on torch's delays stay what they are.
_MANY_HOSTS = 100
_LEAST = 0.1


def share(max_hosts: int) -> float:
    """What becomes of a delay where so many hosts may take part."""
    return min(1.0, max(_LEAST, max_hosts / _MANY_HOSTS))


def scale(max_hosts: int) -> None:
    """Shortens delays for a run of at most so many hosts."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    delay, factor = LAUNCHER.torchs(dynamic_rendezvous._delay), share(max_hosts)

    def delay_less(seconds) -> None:
        if isinstance(seconds, tuple):
            delay(tuple(factor * each for each in seconds))
        else:
            delay(factor * seconds)

    LAUNCHER.put(dynamic_rendezvous, "_delay", delay_less)


def name_callers() -> None:
    """Events get the same names, from the frames alone."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    LAUNCHER.put(dynamic_rendezvous, "get_method_name", method_name)


def method_name(depth: int = 2) -> str:
    """Of the function that called the one that calls this one, for 2."""
    frame = sys._getframe()
    for _ in range(depth):
        if frame.f_back is None:
            return "no_method_name"
        frame = frame.f_back
    return frame.f_code.co_name


def await_waiting(state, seconds: float) -> bool:
    """Makes the last call of a state last for these seconds yet, while a host waits to join.

    Those of a meeting wait until all of it have left it, and join with their next look. Where a
    busy machine looks more seldom than a last call takes, it would be missed, all would start again
    for it, and another one be late then. torch takes off the list who gives no sign of life.

    Args:
        state: torch's, as a launcher has read it just now.
        seconds: in which the launcher looks again.

    Returns:
        bool: whether the state is another one now.
    """
    if state.complete or state.deadline is None or not state.wait_list:
        return False
    end = datetime.now(timezone.utc) + timedelta(seconds=seconds)  # torch's clock for it
    state.deadline = max(state.deadline, end)
    return True
