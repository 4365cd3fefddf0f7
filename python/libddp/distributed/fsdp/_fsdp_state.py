"""What torch's own code asks of the state of a sharded module, as far as there is such a thing."""

from __future__ import annotations

from typing import Any


class _OnlyWhatIsThere:
    """Says what cannot be done where an attribute is asked for that there is not."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"libddp fsdp: the state of a sharded module has no {name!r}: libddp's units are in "
            "C++, so what hooks torch's Python code, as FSDPMemTracker does, cannot be used. Hint: "
            "measure with torch.profiler, or shard with torch's fully_shard for it."
        )


class FsdpParamGroup(_OnlyWhatIsThere):
    """What scripts set of a unit: DINOv3 keeps `post_forward_mesh_info` over `_lazy_init`, so that
    its outermost unit is resharded behind its forward. Here it stays as the module was sharded.
    """

    def __init__(self) -> None:
        self.post_forward_mesh_info: Any = None


class FsdpState(_OnlyWhatIsThere):
    """What FSDPModule._get_fsdp_state gives.

    torch's pipeline schedules ask whether two stages share streams (`_comm_ctx`); they never do.
    Its memory tracker replaces hooks of Python's, which are in C++ here.
    """

    def __init__(self, own: Any) -> None:
        #: Another object for each unit.
        self._comm_ctx = own
        #: As with torch, None where the module has no parameters of its own.
        self._fsdp_param_group = FsdpParamGroup() if own.parameters else None

    def _lazy_init(self) -> None:
        """Without effect: the first forward makes what is to be made."""
