"""Which units average gradients: what set_requires_gradient_sync has said of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


def settle(root: WrappedModule) -> None:
    """The units of the model do what their flags say from the next pass on."""
    for wrapped in root.all_wrapped:
        wrapped.unit.set_sync(wrapped.syncs)
    # As with torch, the flags of units without gradients say nothing.
    root.model.syncs = any(wrapped.syncs for wrapped in root.all_wrapped if wrapped.parameters)
