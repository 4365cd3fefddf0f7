"""Whether the system tells the launcher of the end of any process (pidfd_open, Linux 5.3)."""

from __future__ import annotations

import os


def require(flag: str) -> None:
    """
    Raises:
        ArgumentError: it does not, and the launcher would miss what `flag` has it wait for.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:  # a Python built for an older kernel lacks the name
        from libddp.errors import ArgumentError

        raise ArgumentError(
            f"libddp run: {flag} watches workers by pidfd_open, which this system does not give "
            f"({error}): Linux before 5.3, a sandbox, or a Python built for one. Hint: leave out "
            f"{flag}."
        ) from error
