"""The benches of a GPU, where there is none: they say so, and run with small sizes on the host."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("gpu_*.py"))
SMALL = ["--device=cpu", "--rounds=2", "--steps=1", "--batch=2", "--layers=2", "--heads=2"]
SMALL += ["--width=16", "--length=8", "--vocabulary=64"]


@pytest.fixture(autouse=True)
def _bench_on_the_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])


def test_there_are_some():
    assert {"gpu_ddp", "gpu_enqueue", "gpu_fsdp", "gpu_two_ranks"} <= set(NAMES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_it_says_so(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert not end.value.code
    assert capsys.readouterr().out == f"SKIPPED {name}.py: needs a GPU\n"


@pytest.mark.parametrize("name", ["gpu_ddp", "gpu_fsdp", "gpu_nanogpt", "gpu_checkpoint"])
def test_on_the_host(name):
    done = subprocess.run(
        [sys.executable, BENCH / f"{name}.py", *SMALL],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert any("libddp" in line.get("candidate", "") for line in lines)
    assert any("target" in line for line in lines)


def test_enqueueing_on_the_host():
    command = [sys.executable, BENCH / "gpu_enqueue.py", "--device=cpu", "--rounds=2", "--calls=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"candidate": "torch async"' in done.stdout


def test_what_ran_on_a_device():
    """From a trace as torch's profiler writes it."""
    gpu = importlib.import_module("gpu")
    move = {"Input Dims": [[4, 8], [4, 8], []], "Input type": ["c10::BFloat16", "float", "Scalar"]}
    found = gpu.summary(
        [
            {"cat": "kernel", "name": "gemm", "dur": 1500},
            {"cat": "kernel", "name": "gemm", "dur": 500},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 10, "args": {"bytes": 64}},
            {"cat": "cpu_op", "name": "aten::copy_", "dur": 5, "args": move},
            {"cat": "cpu_op", "name": "aten::mm", "dur": 5, "args": move},
            {"name": "a counter"},
        ]
    )
    assert (found.kernels, found.copies, found.copied_bytes) == (3, 1, 64)
    assert found.moved_bytes == 4 * 8 * 4
    assert found.busy_ms == pytest.approx(2.01)
