"""The launchers that goodput.py and restart.py compare, and how one job of each is run.

    for name, peer in chosen("libddp-preload,dlrover", dlrover_python).items():
        with Job(name, peer, script, config, folder, ranks=4, max_restarts=1000) as job:
            ...  # job.process, job.output()
    repeat_skips()

What is not here or does not run is named, with the reason, by a line that begins with SKIPPED. A
job's processes are gone when it is left, and what DLRover leaves in shared folders, too.
The torch peers and DLRover use torch's DDP on gloo. torchrun's workers are told not to use the
agent's store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE): with it gloo mostly times out in the first
restart on one host (connectFullMesh, torch 2.15). DLRover's agent does not share its store either.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Peer:
    """`saves`: the class of recovery_saves.py that its workers use."""

    saves: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.saves == "Libddp"


_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PEERS = {
    "libddp": Peer("Libddp", ("-m", "libddp.run", "--standalone")),
    "libddp-preload": Peer("Libddp", ("-m", "libddp.run", "--standalone", "--preload")),
    "libddp-in-place": Peer("Libddp", ("-m", "libddp.run", "--preload", "--in-place")),
    "torch-save": Peer("TorchFile", _TORCHRUN, _OWN_STORE),
    "torch-dcp-async": Peer("DcpAsync", _TORCHRUN, _OWN_STORE),
    "dlrover": Peer("DlroverMemory", (str(HERE / "dlrover_run.py"), "--standalone")),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", default=",".join(PEERS), help="some of " + ", ".join(PEERS))
    add_dlrover_option(parser)


def add_dlrover_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dlrover-python",
        default=os.environ.get("LIBDDP_DLROVER_PYTHON", sys.executable),
        help="an interpreter that has dlrover, torch and libddp (LIBDDP_DLROVER_PYTHON)",
    )


def chosen(names: str, dlrover_python: str) -> dict[str, Peer]:
    """Those that are here; a line for each that is not. Unknown names are an error."""
    peers = {name: PEERS[name] for name in names.split(",")}
    reason = why_no_dlrover(dlrover_python) if "dlrover" in peers else ""
    if reason:
        skip("dlrover", reason)
        del peers["dlrover"]
    return peers


_skips: list[str] = []


def skip(name: str, reason: str) -> None:
    _skips.append(f"SKIPPED: {name} ({reason})")
    print(_skips[-1], flush=True)


def repeat_skips() -> None:
    """Below a table, where they are not overlooked."""
    print("\n".join(_skips), end="\n" if _skips else "")


def why_no_dlrover(python: str) -> str:
    """Its launcher, master and checkpointer are imported; "" where that works."""
    parts = ("elastic_run", "flash_checkpoint.ddp")
    modules = [f"dlrover.trainer.torch.{part}" for part in parts]
    line = "import " + ", ".join([*modules, "dlrover.python.master.local_master"])
    try:
        done = subprocess.run([python, "-c", line], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


class Job:
    """A launcher with its workers, which write `pid-RANK` into `folder`."""

    def __init__(
        self,
        name: str,
        peer: Peer,
        script: Path,
        config: dict,
        folder: Path,
        *,
        ranks: int,
        max_restarts: int,
        python: str = sys.executable,
    ) -> None:
        self.folder = folder
        self._run_id = f"libddp-bench-{os.getpid()}-{folder.name}"
        config = config | {"saves": peer.saves, "folder": str(folder), "peer": name}
        flags = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
        flags.append("--monitor-interval=0.1")
        command = [python, *peer.command, *flags, str(script), json.dumps(config)]
        folder.mkdir()
        with open(folder / "output.txt", "w") as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | self._environment() | peer.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "LIBDDP_LOG_LEVEL": "ERROR",
            "LIBDDP_KEEPER_LOG": os.devnull,
            "ELASTIC_JOB_NAME": self._run_id,  # DLRover's names in shared folders begin with it
        }

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind, value, trace) -> None:
        self._end()
        shutil.rmtree(Path("/tmp/ckpt_sock", self._run_id), ignore_errors=True)
        for left in Path("/dev/shm").glob(self._run_id + "*"):
            left.unlink()

    def _end(self) -> None:
        """SIGTERM first; a launcher that is killed may leave workers."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            workers = list(self.worker_pids())
            self.process.kill()
            self.process.wait()
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def worker_pids(self) -> Iterator[int]:
        """Of those that live; a pid that is another's by now is not among them."""
        for path in self.folder.glob("pid-*"):
            pid = int(path.read_text() or 0)
            if self.is_worker(pid):
                yield pid

    def is_worker(self, pid: int) -> bool:
        try:
            parent = _parent(pid)
            return self.process.pid in (parent, _parent(parent))  # between them: who forks
        except OSError:
            return False  # it has ended

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")[-3000:]

    def await_end(self, seconds: float) -> None:
        """RuntimeError with the job's output where it fails or takes longer."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"runs after {seconds:.0f} s:\n{self.output()}") from None
        if status != 0:
            raise RuntimeError(f"ended with {status}:\n{self.output()}")

    def await_that(self, condition, seconds: float) -> None:
        """Until it holds; RuntimeError with the job's output where it ends or takes longer."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with {self.process.returncode}:\n{self.output()}")
            if time.monotonic() > end:
                raise RuntimeError(f"not there after {seconds:.0f} s:\n{self.output()}")
            time.sleep(0.01)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
