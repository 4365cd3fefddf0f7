"""libddp snapshot ls | show | verify | persist | export: snapshots from outside of their job.

main(["ls", "out/run"])
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from libddp._snapshot_command._words import parse


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status. Wrong usage ends the program with status 2."""
    command, chosen = parse(arguments)
    from libddp.errors import Error  # torch comes with it

    try:
        return _run(command)(chosen)
    except (Error, OSError) as error:
        print(f"libddp snapshot {command}: {error}", file=sys.stderr)
        return 1


def _run(command: str):
    if command == "ls":
        from libddp._snapshot_command._ls import run
    elif command == "show":
        from libddp._snapshot_command._show import run
    elif command == "verify":
        from libddp._snapshot_command._verify import run
    elif command == "persist":
        from libddp._snapshot_command._persist import run
    else:
        from libddp._snapshot_command._export import run
    return run
