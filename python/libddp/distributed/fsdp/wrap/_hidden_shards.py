"""What to make of an error in a forward that has used a weight of a unit that does not run.

While a forward runs, the parameters of such units show this rank's part as a vector; torch's error
speaks of sizes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule

#: "vec (0)", "[0]", "must be a matrix, got 1-D tensor", "dimension out of range".
_ABOUT_SIZES = re.compile(r"\b0\b|\b[12]-?D\b|dimension|shape|size", re.IGNORECASE)
_MOST_NAMES = 3


def explain(error: BaseException, root: WrappedModule) -> None:
    """Says so behind the message (Python 3.11), where there are such units and it may be that."""
    if not isinstance(error, (RuntimeError, ValueError, IndexError)):
        return
    names = [
        repr(wrapped.name)
        for wrapped in root.all_wrapped
        if wrapped.parameters and wrapped.sharding.num_shards > 1 and not wrapped.unit.is_whole
    ]
    if not names or not _ABOUT_SIZES.search(str(error)) or not hasattr(error, "add_note"):
        return
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    error.add_note(
        "libddp fsdp: if a parameter of a unit whose own forward was not running has been used "
        f"here (units {', '.join(names[:_MOST_NAMES])}{more}), it showed this rank's part of it. "
        "Hint: use it in its module's forward, or wrap the module that uses it together with it."
    )
