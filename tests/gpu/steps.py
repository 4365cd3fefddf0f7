"""What tests/gpu/run.sh does, in the order of its value: a time limit cuts off the end.

for stage in stages(places): ...      # steps of a stage run side by side, `width` at a time
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Files of tests/gpu, each a step of its own with a process of its own.
TEST_FILES = (
    "collectives",
    "streams",
    "errors",
    "ddp",
    "fsdp",
    "fsdp_state",
    "snapshot",
    "activation",
    "modules",
    "no_sync_points",
)
#: Parts of tests/gpu/test_examples.py, each of which starts several programs: what pytest -k takes.
EXAMPLES = {
    "nanogpt-bf16": "test_nanogpt and bfloat16",
    "nanogpt-fp16": "test_nanogpt and float16 and not bfloat16",
    "nanogpt-fp32": "test_nanogpt and float32",
    "nanogpt-more": "test_nanogpt_",
    "gpt2-parity": "test_gpt2 and engine",
    "gpt2-resume": "test_gpt2 and resumes",
    "mingpt": "mingpt",
    "ddp-limits": "does_not_fit",
}
#: tests/bench/gpu_NAME.py, its arguments, its limit in seconds.
BENCHES = (
    ("enqueue", [], 45),
    ("snapshot", [], 60),
    ("ddp", [], 75),
    ("fsdp", [], 75),
    ("nanogpt", [], 75),
    ("checkpoint", [], 60),
)


@dataclass(frozen=True)
class Places:
    """Where a run has its things."""

    #: libddp's installation, and what is built on the way to it.
    prefix: Path
    build: Path
    #: Files of the run that nobody reads afterwards.
    scratch: Path
    #: LIBDDP_GPU_NCCL, or "".
    nccl: str


@dataclass(frozen=True)
class Step:
    name: str
    #: What it shows, in a few words.
    words: str
    command: list[str]
    #: Seconds after which its processes are killed.
    limit: int
    #: Tests write down each result and go on behind one that hangs; benches print JSON lines.
    kind: str = "program"
    environment: dict[str, str] = field(default_factory=dict)
    #: Why it cannot run here, or "".
    missing: Callable[[], str] = str


@dataclass(frozen=True)
class Stage:
    steps: list[Step]
    width: int = 1


def stages(places: Places) -> list[Stage]:
    return [
        Stage([build(places)]),
        Stage([tests(name, 100) for name in TEST_FILES], width=len(TEST_FILES)),
        Stage([two_ranks(places), *map(examples, EXAMPLES), sanitizer()], width=10),
        *(Stage([bench(*each)]) for each in BENCHES),
        Stage([bench_two_ranks(places)]),
    ]


def build(places: Places) -> Step:
    command = [sys.executable, "-m", "pip", "install", "--target", str(places.prefix), "--upgrade"]
    command += ["--no-build-isolation", "--no-deps", "--no-index", "--no-compile"]
    command += ["--disable-pip-version-check", f"--config-settings=build-dir={places.build}", "."]
    return Step("build", "pip install . with what is there, without nvcc", command, 240)


def tests(name: str, limit: int) -> Step:
    path = f"tests/gpu/test_{name}.py"
    # Several files run at once.
    few = {"OMP_NUM_THREADS": "2"}
    return Step(name, f"pytest {path}, world size 1", pytest(path), limit, "tests", few)


def examples(part: str) -> Step:
    command = [*pytest("tests/gpu/test_examples.py"), "-k", EXAMPLES[part]]
    few = {"OMP_NUM_THREADS": "2"}
    return Step(f"examples-{part}", f"the examples: {part}", command, 120, "tests", few)


def pytest(path: str) -> list[str]:
    """Descriptor 2 stays the log's: what ends the process in mid-word says so there."""
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", path]


def two_ranks(places: Places) -> Step:
    words = "two processes on one GPU: collectives, DDP, FSDP, kill -9, SIGSTOP"
    return Step(
        "two-ranks",
        words,
        pytest("tests/gpu/test_two_ranks.py"),
        140,
        "tests",
        shared_device(places),
        lambda: missing_nccl(places),
    )


def bench(name: str, arguments: list[str], limit: int) -> Step:
    path = f"tests/bench/gpu_{name}.py"
    return Step(
        f"bench-{name}", f"python {path}", [sys.executable, path, *arguments], limit, "bench"
    )


def bench_two_ranks(places: Places) -> Step:
    path = "tests/bench/gpu_two_ranks.py"
    return Step(
        "bench-two-ranks",
        f"python {path}",
        ["bash", "tests/gpu/with_mps.sh", sys.executable, path],
        75,
        "bench",
        shared_device(places),
        lambda: missing_nccl(places),
    )


def sanitizer() -> Step:
    tool = shutil.which("compute-sanitizer") or "compute-sanitizer"
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, "tests/gpu/sanitized.py"]
    return Step(
        "sanitizer",
        "compute-sanitizer on collectives and DDP",
        command,
        120,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        missing=lambda: "" if shutil.which("compute-sanitizer") else "no compute-sanitizer here",
    )


def shared_device(places: Places) -> dict[str, str]:
    """Variables for two ranks on one device, over the NCCL that LIBDDP_GPU_NCCL names."""
    variables = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "8",  # both ranks' kernels must fit on the device together
        # Asking the driver instead would leave forked processes without CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    library = nccl_library(places)
    if library:
        old = os.environ.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(library.parent), old]))
        variables["LD_PRELOAD"] = str(library)
    return variables


def nccl_library(places: Places) -> Path | None:
    if not places.nccl:
        return None
    found = sorted(Path(places.nccl).resolve().rglob("libnccl.so.2*"))
    return found[0] if found else None


def missing_nccl(places: Places) -> str:
    """torch's own NCCL will do where it is new enough; the version is asked where it will run."""
    import machine

    if places.nccl and nccl_library(places) is None:
        return f"LIBDDP_GPU_NCCL={places.nccl}: there is no libnccl.so.2"
    version = machine.nccl_version(shared_device(places))
    if version >= (2, 30, 0):
        return ""
    words = ".".join(map(str, version)) or "none"
    return (
        f"two ranks on one GPU need NCCL 2.30, here is {words}; "
        "LIBDDP_GPU_NCCL names a folder with another libnccl.so.2"
    )
