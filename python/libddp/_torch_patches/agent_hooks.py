"""What torch's elastic agent tells `libddp run`, and how long it waits for its workers.

Replaces `close` and `wait` of PContext, which stops the workers of an agent and tells how they
ended, and `get_rendezvous_handler`, which makes what an agent asks before each start of workers.
The agent has no hooks; a subclass of it would depend on its private methods and on a constructor
that differs from version to version, and these three are public. PContext.close waits 30 s for
a worker that does not end, whatever the agent's timeout is. `libddp run` asks for it, in its own
process; it stays for good.
"""

from __future__ import annotations

from collections.abc import Callable

from libddp._torch_patches.replacing import LAUNCHER


def stop_within(seconds: float) -> None:
    """SIGTERM, and so many seconds later SIGKILL, for workers that the agent stops."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_in_time(self, death_sig=None, timeout=None):
        close(self, death_sig, seconds)

    LAUNCHER.put(PContext, "close", close_in_time)


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
