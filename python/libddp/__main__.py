"""The command `libddp`, also `python -m libddp`.

libddp run ...          start a distributed job (torchrun's flags)
libddp overlap ...      how much communication a trace of save_trace() hides
libddp plan ...         memory of a training job, before it runs
libddp consolidate ...  one safetensors file of a sharded checkpoint
libddp --version        what this installation is: for bug reports
libddp --cmake-dir      prefix for CMAKE_PREFIX_PATH of C++ programs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"]:
        from libddp.run import main as run

        run(arguments[1:])
        return 0
    if arguments[:1] == ["overlap"]:
        from libddp._overlap import main as overlap

        return overlap(arguments[1:])
    if arguments[:1] == ["plan"]:
        from libddp.plan.command import main as plan

        return plan(arguments[1:])
    if arguments[:1] == ["consolidate"]:
        from libddp._consolidate import main as consolidate

        return consolidate(arguments[1:])
    parser = argparse.ArgumentParser(
        "libddp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "command",
        nargs="?",
        choices=["run", "overlap", "plan", "consolidate"],
        help="described above; see its --help",
    )
    group.add_argument("--version", action="store_true", help="describe this installation")
    group.add_argument("--cmake-dir", action="store_true", help="print the CMake prefix")
    chosen = parser.parse_args(arguments)
    print(report() if chosen.version else Path(__file__).parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
