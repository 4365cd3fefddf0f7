"""Dependencies of the wheel: exactly the torch minor version it was built against.

The extension links torch's C++ libraries, whose interface changes with every minor version.
"""

from __future__ import annotations

from typing import Any

import target_torch


def dynamic_metadata(field: str, settings: dict[str, Any]) -> list[str]:
    """Called by scikit-build-core for ``project.dependencies``."""
    if field != "dependencies":
        raise ValueError(f"libddp_metadata provides 'dependencies', not {field!r}")
    torch = target_torch.find()
    requirement = torch.requirement if torch else target_torch.DEFAULT_REQUIREMENT
    return [requirement]
