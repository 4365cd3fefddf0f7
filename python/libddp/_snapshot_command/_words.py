"""The words of `libddp snapshot`: what is wrong with them is said before torch is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from libddp._command_line import Parser

COMMANDS = ("ls", "show", "verify", "persist", "export")

_TOP = """snapshots of libddp.Snapshot, from outside of their job

  libddp snapshot ls FOLDER          what is there, and what this host's keeper has in memory
  libddp snapshot show FOLDER        tensors and values of one
  libddp snapshot verify FOLDER      every byte against its checksum
  libddp snapshot persist FOLDER     the keeper stores now what memory has newest
  libddp snapshot export FOLDER OUT  one safetensors file of whole tensors

FOLDER is the one that libddp.Snapshot was given. docs/snapshots.md has the whole of it.
Exit status: 0, 1 for what is damaged or cannot be done, 2 for wrong usage.
"""
_LS = """what is in a folder of snapshots, and in the memory that this host's keeper has of the job

Exit status: 0, 1 where something cannot be read, 2 for wrong usage.
"""
_SHOW = """tensors and values of one snapshot

A line per tensor: name, type, shape, and which rank has which of its elements. Values are cut where
they are long. Exit status: 0, 1 for what cannot be read, 2 for wrong usage.
"""
_VERIFY = """every byte of a snapshot against its checksum

Names file, tensor and bytes of all that is damaged. Exit status: 0, 1 for damage, 2 for wrong
usage.
"""
_PERSIST = """the keeper of this host stores what its memory has newest, now

For jobs that save to memory more often than to the folder: before a machine is taken away. The job
goes on meanwhile. With several hosts it is run on each of them. Exit status: 0, 1 if it is not
stored, 2 for wrong usage.
"""
_EXPORT = """one safetensors file of a snapshot's whole tensors, whatever ranks had of them

Names of the model lose their "model."; a parameter with several names is there once, and the
others are in the file's metadata. Every byte is checked on its way. Exit status: 0, 1 for what
cannot be read or written, 2 for wrong usage.
"""


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The command and what it was given. Wrong usage ends the program with status 2."""
    command, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if command in COMMANDS:
        parser = _PARSERS[command]()
        chosen = parser.parse_args(rest)
        if command == "ls" and chosen.folder is None and chosen.run is None:
            parser.error("the following arguments are required: folder, or --run")
        return command, chosen
    parser = Parser("libddp snapshot", _TOP)
    parser.add_argument("command", metavar="|".join(COMMANDS), help="see its --help")
    if command and not command.startswith("-"):
        parser.refuse_word(command, COMMANDS)
    return command, parser.parse_args(list(arguments))


def _ls() -> Parser:
    parser = Parser("libddp snapshot ls", _LS)
    parser.add_argument("folder", nargs="?", help="of libddp.Snapshot, or its address")
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="everything in bytes, on one line")
    return parser


def _show() -> Parser:
    parser = Parser("libddp snapshot show", _SHOW)
    _add_folder(parser)
    _add_step(parser)
    parser.add_argument("--rank", type=_number, help="whose values (default: the lowest that has)")
    return parser


def _verify() -> Parser:
    parser = Parser("libddp snapshot verify", _VERIFY)
    _add_folder(parser)
    group = parser.add_mutually_exclusive_group()
    _add_step(group)
    group.add_argument("--all", action="store_true", help="all that are there")
    return parser


def _persist() -> Parser:
    parser = Parser("libddp snapshot persist", _PERSIST)
    _add_folder(parser)
    _add_run(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long it is waited for (default: %(default)g)",
    )
    return parser


def _export() -> Parser:
    parser = Parser("libddp snapshot export", _EXPORT)
    _add_folder(parser)
    parser.add_argument("output", type=Path, help="file to write, *.safetensors")
    _add_step(parser)
    parser.add_argument("--model-only", action="store_true", help="without optimizer and the rest")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    return parser


_PARSERS = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "persist": _persist,
    "export": _export,
}


def _add_folder(parser) -> None:
    parser.add_argument("folder", help="of libddp.Snapshot, or its address")


def _add_run(parser) -> None:
    parser.add_argument("--run", metavar="NAME", help="of the job (default: what the folder says)")


def _add_step(parser) -> None:
    parser.add_argument("--step", type=_number, metavar="N", help="which one (default: the newest)")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e8:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
