"""Starts the scripts of tests/python/drop_in/scripts on torch and on libddp, and compares.

theirs, ours = drop_in.both("nanogpt_train.py", tmp_path)   # lists of results, by rank
drop_in.verify(theirs, ours)

In a process of its own: `with drop_in.installed(): ...`
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import launches
import pytest

SCRIPTS = Path(__file__).parents[1] / "drop_in" / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LIBDDP_RUN = ("-m", "libddp.run", "--drop-in", "--nproc-per-node=2")
DEADLINE = 300
GLOO_TRIES = 5


@contextmanager
def installed() -> Iterator[None]:
    """libddp is in torch's place inside."""
    import libddp

    libddp.install()
    try:
        yield
    finally:
        libddp.uninstall()


def both(script: str, folder: Path, *arguments: str) -> tuple[list[dict], list[dict]]:
    """The script's results under torchrun on Gloo, and under `libddp run --drop-in`."""
    theirs = on_gloo(lambda name: results(TORCHRUN, script, folder / name, *arguments))
    return theirs, results(LIBDDP_RUN, script, folder / "libddp", *arguments)


def on_gloo(start: Callable[[str], list[dict]]) -> list[dict]:
    """start(name), which runs torch on Gloo; after a failure of Gloo itself once more, or again.

    Gloo's threads abort a process that is through with its script, on a busy machine often: they
    drop a tensor while Python ends.
    """
    for attempt in range(GLOO_TRIES - 1):
        try:
            return start(f"torch-{attempt}")
        except AssertionError as failure:
            if "terminate called without an active exception" not in str(failure):
                raise
    return start("torch")


def results(launcher, script: str, folder: Path, *arguments: str, **variables) -> list[dict]:
    """What each rank of the script wrote. {folder} in an argument becomes a folder of this run."""
    folder.mkdir(parents=True)
    filled = [argument.format(folder=folder) for argument in arguments]
    done = run([*launcher, str(SCRIPTS / script), *filled], folder, **variables)
    assert done.returncode == 0, done.stdout
    return [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]


def run(command, folder: Path, **variables) -> subprocess.CompletedProcess:
    """Runs Python; stdout holds what it and the ranks wrote. Nothing outlives the deadline."""
    process = launches.python(command, folder, {**environment(folder), **variables})
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its workers
        output = process.communicate(timeout=90)[0] + "\n[ended at the deadline]"
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output)


def environment(folder: Path) -> dict[str, str]:
    """Of a fresh job, in which torch finds libddp's entry point as after `pip install`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("LIBDDP_DROP_IN", "RANK")}
    path = kept.get("PYTHONPATH", "")
    if not any(e.name == "libddp" for e in entry_points(group="torch.backends")):
        path = f"{path}{os.pathsep}{_metadata(folder)}"
    return {
        **kept,
        "PYTHONPATH": path,
        "RESULTS": str(folder),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the models of the scripts are on the CPU
    }


def verify(theirs: list[dict], ours: list[dict]) -> None:
    """It was torch's reducer there and libddp's here, and the numbers are the same to the bit."""
    assert [(r["wrapper"], r["backend"]) for r in theirs] == [("torch", "gloo")] * 2
    assert [(r["wrapper"], r["backend"]) for r in ours] == [("libddp", "libddp")] * 2
    for their, our in zip(theirs, ours, strict=True):
        assert len(our["losses"]) > 3
        assert our["losses"] == their["losses"]
        assert our["weight"] == their["weight"]


def verify_sharded(theirs: list[dict], ours: list[dict]) -> None:
    """The same for sharded models, up to the order in which ranks' parts of a norm are added."""
    assert [(r["wrapper"], r["backend"]) for r in theirs] == [("torch", "gloo")] * 2
    assert [(r["wrapper"], r["backend"]) for r in ours] == [("libddp", "libddp")] * 2
    for their, our in zip(theirs, ours, strict=True):
        assert len(our["losses"]) > 3
        assert our["losses"] == pytest.approx(their["losses"], rel=1e-5)
        assert our["weight"] == pytest.approx(their["weight"], rel=1e-5)


def _metadata(folder: Path) -> Path:
    """For a build that is only on the path: what an installation tells torch."""
    info = folder / "metadata" / "libddp-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: libddp\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nlibddp = libddp._autoload:register\n")
    return info.parent
