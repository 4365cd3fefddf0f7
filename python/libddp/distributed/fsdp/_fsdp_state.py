"""What torch's own code asks of the state of a sharded module, as far as there is such a thing."""

from __future__ import annotations

from typing import Any


class FsdpState:
    """What FSDPModule._get_fsdp_state gives.

    torch's pipeline schedules ask whether two stages share streams (`_comm_ctx`); they never do.
    Its memory tracker replaces hooks of Python's, which are in C++ here.
    """

    def __init__(self, own: Any) -> None:
        #: Another object for each unit.
        self._comm_ctx = own

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"libddp fsdp: the state of a sharded module has no {name!r}: libddp's units are in "
            "C++, so what hooks torch's Python code, as FSDPMemTracker does, cannot be used. Hint: "
            "measure with torch.profiler, or shard with torch's fully_shard for it."
        )
