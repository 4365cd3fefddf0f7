"""The words of the command `libddp`: what is wrong with them is said before torch is imported.

chosen = parser_of("overlap").parse_args(["trace.json"])    # a fifth of a second, torch takes ten
"""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

#: By name; see PARSERS. `run` is torchrun's, `snapshot` has commands of its own.
COMMANDS = ("run", "overlap", "plan", "consolidate", "snapshot")
#: What the options of `plan` call torch's dtypes.
DTYPES = ("float32", "fp32", "bfloat16", "bf16", "float16", "fp16")
#: What Python, torch and libddp take in a rank that has trained something tiny, files aside.
PROCESS = "350MiB"

_TOP = """fast distributed training on LibTorch

  libddp run ...          start a distributed job (torchrun's flags)
  libddp overlap ...      how much communication a trace of save_trace() hides
  libddp plan ...         memory of a training job, before it runs
  libddp consolidate ...  one safetensors file of a sharded checkpoint
  libddp snapshot ...     list, show, verify, store and export snapshots
  libddp --version        what this installation is: for bug reports
  libddp --cmake-dir      prefix for CMAKE_PREFIX_PATH of C++ programs
"""
_OVERLAP = """how much communication computation hides

Reads what DistributedDataParallel.save_trace() wrote and prints a line per rank: milliseconds of
backward computation and of communication over all passes of the trace, the part of the
communication that lies inside this rank's backward, and its percentage. --output draws the last
passes. Exit status: 0, 1 for a file that is no such trace, 2 for wrong usage.
"""
_CONSOLIDATE = """one file of a sharded checkpoint's model

Reads what save_snapshot or torch.distributed.checkpoint.save has written, on any number of ranks,
tensor by tensor, in one process without a group. Exit status: 0, 1 for what cannot be read or
written, 2 for wrong usage.
"""
_PLAN = """the memory of a training job, before it runs

  libddp plan --gpt gpt2 --batch 8 --length 1024 --ranks 4 --limit 16GiB
  libddp plan --model model.py:GPT --model-args '{"n_layer": 12}' --batch 8 --length 1024

Prints, for DDP, ZeRO-1 and each sharding strategy of FSDP, without and with activation
checkpointing, the bytes that each rank and all ranks of a host take beyond a process without a
model. Nothing is allocated: the model runs on tensors without data. docs/planning.md says what each
column is. Exit status: 0, 1 for wrong input, 2 for wrong usage, 3 if nothing fits --limit.
"""


class Parser(argparse.ArgumentParser):
    """argparse's, with the nearest word for one that it does not know."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(
            name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def parse_args(self, args=None, namespace=None):
        known, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                options = [o for o in self._option_string_actions if o.startswith("--")]
                self.error(f"there is no {word.split('=')[0]}{_nearest(word, options)}")
        if unknown:
            self.error(f"too many arguments: {' '.join(unknown)}")
        return known

    def refuse_word(self, word: str, words: tuple[str, ...]) -> NoReturn:
        """Ends the program: `word` is none of `words`."""
        near = _nearest(word, words) or f". Hint: one of {', '.join(words)}"
        self.error(f"there is no {word!r}{near}")


def _nearest(word: str, words) -> str:
    near = get_close_matches(word.split("=")[0], list(words), n=1, cutoff=0.5)
    return f". Hint: did you mean {near[0]}?" if near else ""


def top_parser() -> Parser:
    parser = Parser("libddp", _TOP)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("command", nargs="?", metavar="|".join(COMMANDS), help="see its --help")
    group.add_argument("--version", action="store_true", help="describe this installation")
    group.add_argument("--cmake-dir", action="store_true", help="print the CMake prefix")
    return parser


def _overlap_parser() -> Parser:
    parser = Parser("libddp overlap", _OVERLAP)
    parser.add_argument("trace", type=Path, help="a file written by save_trace()")
    parser.add_argument("--output", type=Path, help="image to draw (.png, .svg, .pdf)")
    parser.add_argument(
        "--passes", type=_at_least_one, default=3, help="passes to draw, from the last one"
    )
    return parser


def _consolidate_parser() -> Parser:
    parser = Parser("libddp consolidate", _CONSOLIDATE)
    parser.add_argument("checkpoint", type=Path, help="folder of the snapshot, or of DCP's files")
    parser.add_argument("output", type=Path, help="file to write, *.safetensors")
    parser.add_argument(
        "--prefix",
        default="model.",
        help="what the names of the model begin with in the checkpoint; it is left out in the file "
        '(default: "model."; "" takes everything)',
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    return parser


def _plan_parser() -> Parser:
    parser = Parser("libddp plan", _PLAN)
    add = parser.add_argument
    add("--gpt", metavar="SIZE", help="a GPT: LAYERSxWIDTH, gpt2, gpt2-medium, -large, -xl")
    add("--vocabulary", type=_at_least_one, help="of --gpt (default: that of GPT-2)")
    add("--model", metavar="PLACE:NAME", help="MODULE or FILE.py, and what makes the model in it")
    add("--model-args", default="{}", metavar="JSON", help="arguments, or fields of its dataclass")
    add("--batch", type=int, default=8, help="of one rank (default: %(default)s)")
    add("--length", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    add("--inputs", metavar="DTYPE:SHAPE,...", help="what forward takes, instead of token ids")
    add("--block", metavar="CLASS,...", help="wrapped and recomputed; default: what repeats most")
    add("--ranks", type=int, default=2, help="default: %(default)s")
    add("--ranks-per-host", type=int, help="default: all")
    add("--optimizer", default="adamw", help="of torch.optim, or libddp.adamw (default: adamw)")
    add("--optimizer-args", default="{}", metavar="JSON")
    dtype = {"type": _dtype, "metavar": "DTYPE"}
    add("--dtype", default="float32", **dtype, help="of the parameters (default: %(default)s)")
    add("--autocast", **dtype, help="the pass runs under torch.autocast")
    add("--param-dtype", **dtype, help="MixedPrecision's param_dtype")
    add("--reduce-dtype", **dtype, help="MixedPrecision's reduce_dtype")
    add("--deferred", action="store_true", help="the model is on the meta device when wrapped")
    add("--limit", metavar="SIZE", help="memory of a host, as in 8GiB: what fits?")
    add("--process", default=PROCESS, help="of a rank before its model (default: %(default)s)")
    add("--json", action="store_true", help="everything in bytes, on one line")
    return parser


_PARSERS = {
    "overlap": _overlap_parser,
    "plan": _plan_parser,
    "consolidate": _consolidate_parser,
}


def parser_of(command: str) -> Parser:
    """Of one of COMMANDS but `run` and `snapshot`."""
    return _PARSERS[command]()


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return text
