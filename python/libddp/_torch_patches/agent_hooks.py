"""What torch's elastic agent tells `libddp run`, and how long it waits for its workers.

Replaces `close` and `wait` of PContext, which stops the workers of an agent and tells how they
ended, and `get_rendezvous_handler`, which makes what an agent asks before each start of workers.
The agent has no hooks; a subclass of it would depend on its private methods and on a constructor
that differs from version to version, and these three are public. PContext.close waits 30 s for
a worker that does not end, whatever the agent's timeout is, and the agent sleeps between two calls
of wait, whatever happens. `libddp run` asks for it, in its own process; it stays for good.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable

from libddp._torch_patches.replacing import LAUNCHER

#: So long an end is looked at again and again.
_NEWS_SECONDS = 0.5
#: Between two looks at workers that the system does not tell of.
_LOOK_SECONDS = 0.05


def stop_within(seconds: float, leave: Callable[[], None]) -> None:
    """SIGTERM, and so many seconds later SIGKILL, for workers that the agent stops.

    Args:
        leave: is called before that where a signal has ended the agent.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    close = PContext.close

    def close_in_time(self, death_sig=None, timeout=None):
        # The agent stops them while it handles that, and tells nobody why.
        if isinstance(sys.exc_info()[1], SignalException):
            leave()
        close(self, death_sig, seconds)

    LAUNCHER.put(PContext, "close", close_in_time)


def wake_at_ends(seconds: float) -> None:
    """The agent's look at its workers takes until one of them ends, at most so long.

    So the agent itself has to sleep for no time (its monitor_interval).
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    wait = PContext.wait
    ended: dict[int, float] = {}  # pid -> since when

    def wait_for_end(self, *args, **kwargs):
        # torch may hear of an end a little later; one that it takes for a success is no news.
        recent = time.monotonic() - _NEWS_SECONDS
        pids = [pid for pid in self.pids().values() if ended.get(pid, recent) >= recent]
        for pid in _await_end(pids, seconds):
            ended.setdefault(pid, time.monotonic())
        return wait(self, *args, **kwargs)

    LAUNCHER.put(PContext, "wait", wait_for_end)


def excuse_failures(function: Callable[[], bool]) -> None:
    """Where `function` says so, the agent does not hear that workers have failed.

    To it they still run; that they are started again is then for the rendezvous to say, as when a
    host comes, and takes nothing from its count of restarts.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    wait = PContext.wait

    def wait_or_excuse(self, *args, **kwargs):
        result = wait(self, *args, **kwargs)
        return None if result is not None and result.is_failed() and function() else result

    LAUNCHER.put(PContext, "wait", wait_or_excuse)


def _await_end(pids: list[int], seconds: float) -> list[int]:
    """Those that have ended, as soon as there are any; [] after so many seconds."""
    descriptors: dict[int, int] = {}
    poll = select.poll()
    try:
        for pid in pids:
            try:
                descriptors[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                return [pid]
            except (AttributeError, OSError):  # see libddp/_pidfds.py
                return _look_for_end(pids, seconds)
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return [descriptors[number] for number, _ in poll.poll(1000 * seconds)]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _look_for_end(pids: list[int], seconds: float) -> list[int]:
    """The same where the system tells nobody of an end."""
    limit = time.monotonic() + seconds
    while True:
        found = [pid for pid in pids if _has_ended(pid)]
        left = limit - time.monotonic()
        if found or left <= 0:
            return found
        time.sleep(min(_LOOK_SECONDS, left))


def _has_ended(pid: int) -> bool:
    """Of a child; how it has ended is left for torch to ask."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def tell_ends(function: Callable[[dict, dict], None]) -> None:
    """Calls `function` each time the agent looks after its workers.

    Args:
        function: gets process ids, and torch's ProcessFailure of those that have failed, both by
            local rank.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    wait = PContext.wait

    def wait_and_tell(self, *args, **kwargs):
        result = wait(self, *args, **kwargs)
        function(self.pids(), {} if result is None else dict(result.failures))
        return result

    LAUNCHER.put(PContext, "wait", wait_and_tell)


def around_rendezvous(function: Callable[[object, Callable], object]) -> None:
    """Calls `function` with the agent's handler and its own `next_rendezvous`.

    What it returns or raises is the agent's answer.
    """
    from torch.distributed.elastic.rendezvous import registry

    make = registry.get_rendezvous_handler

    def make_and_watch(*args, **kwargs):
        handler = make(*args, **kwargs)
        meet = handler.next_rendezvous
        handler.next_rendezvous = lambda: function(handler, meet)
        return handler

    LAUNCHER.put(registry, "get_rendezvous_handler", make_and_watch)
