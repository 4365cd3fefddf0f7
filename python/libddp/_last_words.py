"""What a rank of `libddp run` died of: the file that a worker leaves for the launcher.

A worker writes it where the launcher has named a file for it (`record_error`), in torchrun's
format; the launcher reads it (`read`) for its last screen (_failure_report.py).
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass

from libddp._whole_file import write_text

_FILE = "TORCHELASTIC_ERROR_FILE"
MAX_TEXT = 2000


@dataclass
class LastWords:
    """How one rank ended."""

    rank: int
    text: str
    place: str
    #: By the host's monotonic clock; without a file: a signal first of all, other ends last.
    when: float
    #: Ended because of another rank.
    follows: bool
    #: It is between ranks that called different things.
    is_nobodys: bool = False
    #: The file that says so; None where the process left none.
    path: str | None = None
    #: The last step that it noted.
    step: int | None = None


def record_error(error: BaseException, place: tuple[str, int] | None) -> None:
    """In a worker: what it dies of, in torchrun's format; nothing where no launcher asks for it.

    Args:
        place: path and line in the program.
    """
    from libddp import _steps
    from libddp.errors import PeerError

    path = os.environ.get(_FILE)
    if not path or "RANK" not in os.environ:
        return
    told = {
        "rank": int(os.environ["RANK"]),
        "place": list(place or ()),
        "time": time.monotonic(),
        "follows": isinstance(error, PeerError),
        "is_nobodys": isinstance(error, PeerError) and error.peer_rank < 0,
        "step": _steps.noted(),
    }
    text = "".join(traceback.format_exception_only(error)).strip()[:MAX_TEXT]
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time())), "libddp": told}
    try:
        # The launcher stops the workers that are left, some of them in here: half a file ends
        # torch's agent, and the restarts with it.
        write_text(path, json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError:
        pass  # the exception itself is printed in any case


def read(path: str) -> LastWords | None:
    """What a worker of libddp wrote; None for a file of another kind, or half a file."""
    try:
        with open(path, encoding="utf-8") as file:
            message = json.load(file)["message"]
        told = message["extraInfo"]["libddp"]
        place = "{}:{}".format(*told["place"]) if told["place"] else ""
        text = message["message"]
        return LastWords(
            told["rank"],
            text,
            place,
            told["time"],
            told["follows"],
            told["is_nobodys"],
            path,
            told["step"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
