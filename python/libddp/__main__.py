"""The command `libddp`, also `python -m libddp`: `libddp --help` lists what it does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from libddp._command_line import COMMANDS, parser_of, top_parser
from libddp._version import __version__


def report() -> str:
    """One line per fact about this installation.

    Raises:
        ImportError: the extension does not load; the message says why.
    """
    import torch

    from libddp._load import built_for, load

    info = load().build_info()
    cuda = torch.version.cuda or "none"
    if torch.version.cuda and not torch.cuda.is_available():
        cuda += " (no device)"
    if not info["cuda"]:
        cuda += " (libddp is built without it)"
    nccl = "none"
    if torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return "\n".join(
        [
            f"libddp {__version__}",
            f"torch {torch.__version__} (built for {built_for()})",
            f"CUDA {cuda}",
            f"NCCL {nccl}",
            f"compiler {info['compiler']}",
            f"SIMD {info['simd']} (compiled: {', '.join(info['simd_compiled'])})",
            f"Python {sys.version.split()[0]}",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Wrong usage ends the program with status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "run":
        from libddp.run import main as run

        run(rest)
        return 0
    if command == "snapshot":
        from libddp._snapshot_command import main as snapshot

        return snapshot(rest)
    if command in COMMANDS:
        return _run(command, parser_of(command).parse_args(rest))
    parser = top_parser()
    if command and not command.startswith("-"):
        parser.refuse_word(command, COMMANDS)
    chosen = parser.parse_args(arguments)
    print(report() if chosen.version else Path(__file__).parent)
    return 0


def _run(command: str, chosen: argparse.Namespace) -> int:
    if command == "overlap":
        from libddp._overlap import run
    elif command == "plan":
        from libddp.plan.command import run
    else:
        from libddp._consolidate import run
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
