"""Mistakes of the user, shown as one line instead of a traceback.

with reported("main.py"):
    raise UserError("no such thing. Hint: ask for another one")
"""

import contextlib
import os
import sys
import time


class UserError(Exception):
    """A mistake the user can put right. The message says what, why, and 'Hint: ...'."""


def reason(error: BaseException) -> str:
    """The system's own words if there are any; else the first line of the message."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return words.splitlines()[0]


@contextlib.contextmanager
def reported(name: str):
    """Turn a UserError into one line on stderr and exit status 1.

    As a rule all ranks of a host make the same mistake together, so the first one speaks and the
    others wait: the launcher stops them when the first has ended. One that is alone with its
    mistake is not stopped, and speaks after that.
    """
    try:
        yield
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)
        rank = os.environ.get("RANK")
        where = f" (rank {rank})" if rank is not None else ""
        print(f"{name}: error{where}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
