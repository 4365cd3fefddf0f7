"""The name of libddp's backend among torch's, and its registration there."""

from __future__ import annotations

from collections.abc import Callable

BACKEND = "libddp"
#: Devices whose tensors torch hands to it; those that a build cannot move it refuses by name.
DEVICES = ("cpu", "cuda")


def register_backend(create: Callable) -> None:
    """Registers the backend; does nothing where it is known already or torch has no c10d.

    Args:
        create: makes the backend of one group of this process: `create(options, pg_options)`.
    """
    from torch import distributed

    if distributed.is_available() and not hasattr(distributed.Backend, BACKEND.upper()):
        register = distributed.Backend.register_backend
        register(BACKEND, create, extended_api=True, devices=list(DEVICES))
