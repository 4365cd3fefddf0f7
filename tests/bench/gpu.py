"""What the benches of a GPU (gpu_*.py) have in common: the device, the groups, what ran on it.

    device = gpu.begin(options)            # prints "needs a GPU" and ends the program where none is
    found = gpu.activity(step, device, "libddp")  # kernels and copies of one call
    gpu.target("wrapper over bare step", "<= 0.5 %", 0.31, met=True)

--device=cpu with small sizes runs a bench on the host, to find mistakes in the bench itself.
"""
# ruff: noqa: E402 (the path comes before what is found on it)

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/bench"), str(ROOT / "tests/python/support")]

import pairing
import torch
import torch.distributed as c10d
from torch.profiler import ProfilerActivity, profile


def parser(doc: str, **defaults: int) -> argparse.ArgumentParser:
    """With --device, and whole numbers by name."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--device", default="cuda:0")
    for name, default in defaults.items():
        made.add_argument(f"--{name}", type=int, default=default)
    return made


def begin(options: argparse.Namespace) -> torch.device:
    """Where to measure. Without a GPU it says so, and the program ends as one that has passed."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"SKIPPED {Path(sys.argv[0]).name}: needs a GPU", flush=True)
        raise SystemExit(0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    return device


def alone(device: torch.device):
    """libddp's default group of one rank; returns a group of torch's own engine beside it."""
    import libddp.distributed as dist

    is_cuda = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, store=c10d.HashStore(), rank=0, world_size=1)
    return c10d.new_group(backend="nccl" if is_cuda else "gloo")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def block(step: Callable[[], object], steps: int, device: torch.device) -> Callable[[], None]:
    """So many steps, waited for: what `pairing.compare` times."""

    def run() -> None:
        for _ in range(steps):
            step()
        synchronize(device)

    return run


def gpt2(device: torch.device, options: argparse.Namespace, dtype=torch.float32):
    """GPT-2 in the shape that `options` has (124 M parameters by default), the same every time."""
    sys.path.append(str(ROOT / "examples/nanogpt"))
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    shape = GPTConfig(
        vocab_size=options.vocabulary,
        block_size=options.length,
        n_layer=options.layers,
        n_head=options.heads,
        n_embd=options.width,
        bias=True,
    )
    with device:  # drawing so many numbers takes seconds on a host
        return GPT(shape).to(dtype)


#: The arguments of GPT-2 124M for `parser`.
GPT2 = {"layers": 12, "heads": 12, "width": 768, "length": 1024, "vocabulary": 50304}


def tokens(device: torch.device, options: argparse.Namespace):
    """A batch and its targets, random: zeros would run faster than real data."""
    torch.manual_seed(1)
    rows = torch.randint(options.vocabulary, (options.batch, options.length + 1), device=device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@dataclass
class Activity:
    """What one call has put on the device, in the words of torch's profiler."""

    kernels: int
    copies: int
    copied_bytes: int
    #: Of operators that only move: their device copies, whatever kernel does them.
    moved_bytes: int
    busy_ms: float


#: Operators that move elements and compute nothing.
MOVES = ("aten::copy_", "chunk_cat", "split_with_sizes_copy", "all_gather_copy_in", "_foreach_copy")
SIZES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "c10::Half": 2}


def activity(call: Callable[[], object], device: torch.device, name: str) -> Activity:
    """Of one call, after one more to warm up. Its trace stays where LIBDDP_GPU_TRACES says."""
    call()
    synchronize(device)
    wanted = [ProfilerActivity.CPU]
    wanted += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=wanted, record_shapes=True) as watched:
        call()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        keep_trace(path, name)
        return summary(json.loads(path.read_text())["traceEvents"])


def keep_trace(path: Path, name: str) -> None:
    folder = os.environ.get("LIBDDP_GPU_TRACES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        words = f"{Path(sys.argv[0]).stem}-{name}".replace(" ", "-").replace(",", "")
        with gzip.open(Path(folder) / f"{words}.json.gz", "wb") as file:
            file.write(path.read_bytes())


def summary(events: list[dict]) -> Activity:
    by_kind: dict[str, list[dict]] = {"kernel": [], "gpu_memcpy": [], "gpu_memset": []}
    moved = 0
    for event in events:
        kind = event.get("cat", "")
        if kind in by_kind:
            by_kind[kind].append(event)
        elif kind == "cpu_op" and any(name in event["name"] for name in MOVES):
            moved += moved_bytes(event.get("args", {}))
    on_device = [event for kind in by_kind.values() for event in kind]
    return Activity(
        kernels=len(on_device),
        copies=len(by_kind["gpu_memcpy"]),
        copied_bytes=sum(int(e.get("args", {}).get("bytes", 0)) for e in by_kind["gpu_memcpy"]),
        moved_bytes=moved,
        busy_ms=sum(event.get("dur", 0) for event in on_device) / 1e3,
    )


def moved_bytes(arguments: dict) -> int:
    """Of an operator's largest tensor argument."""
    shapes, kinds = arguments.get("Input Dims", []), arguments.get("Input type", [])
    largest = 0
    for shape, kind in zip(shapes, kinds, strict=False):
        if isinstance(kind, str) and kind in SIZES and shape and not isinstance(shape[0], list):
            numel = 1
            for size in shape:
                numel *= int(size)
            largest = max(largest, numel * SIZES[kind])
    return largest


def target(name: str, limit: str, value: float, *, met: bool) -> None:
    """Whether the measured value is what the library promises."""
    pairing.emit({"target": name, "limit": limit, "value": value, "met": bool(met)})


def emit(lines: list[dict], **more) -> None:
    for line in lines:
        pairing.emit(line | more)


def by_name(lines: list[dict]) -> dict[str, dict]:
    return {line["candidate"]: line for line in lines}
