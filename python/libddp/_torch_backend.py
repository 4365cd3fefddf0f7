"""The name of libddp's backend among torch's, and its registration there."""

from __future__ import annotations

from collections.abc import Callable

BACKEND = "libddp"


def register_backend(create: Callable) -> None:
    """Registers the backend; does nothing where it is known already or torch has no c10d.

    Args:
        create: makes the backend of one group of this process: `create(options, pg_options)`.
    """
    from torch import distributed

    if distributed.is_available() and not hasattr(distributed.Backend, BACKEND.upper()):
        distributed.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
