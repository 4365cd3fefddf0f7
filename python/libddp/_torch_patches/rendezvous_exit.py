"""A host that leaves a run says so at the rendezvous.

Uses the exit operation that torch's dynamic rendezvous keeps to itself: there a host leaves a
meeting only for its own next one. The others of a launcher that a signal has ended would wait until
it has given no sign of life for seconds, and shutdown(), which is public, ends the run for all.
"""

from __future__ import annotations

import time

from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

#: A store that does not answer is the others' trouble, too, and this host has nothing to gain.
SECONDS = 3.0


def leave(handler) -> bool:
    """Takes this host out of the meeting; whether the others can know it.

    Handlers of other kinds have no meeting that outlives a host: False.
    """
    if not isinstance(handler, dynamic.DynamicRendezvousHandler):
        return False
    handler._stop_heartbeats()
    try:
        handler._op_executor.run(dynamic._RendezvousExitOp(), time.monotonic() + SECONDS)
    except RendezvousError:
        return False
    return True
