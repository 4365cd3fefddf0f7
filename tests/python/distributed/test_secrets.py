"""The run key is nowhere but in its file: in no log, report, process table or core dump."""

import base64
import mmap
import os
import resource
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")

#: Rank 1 ends in the middle with a core dump; rank 0 reports that.
SCRIPT = """
import os
import torch
import libddp.distributed as dist

#: What a core dump of this process holds, to show that the search finds what is there.
MARK = bytes.fromhex(os.environ["MARK"])
rank = int(os.environ["RANK"])
os.makedirs(f"rank{rank}")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
group = dist.new_group([0, 1])
dist.barrier(group)
for pid in ("self", str(os.getppid())):
    for name in ("environ", "cmdline"):
        with open(f"/proc/{pid}/{name}", "rb") as shown:
            text = shown.read()
        with open(f"rank{rank}/{pid}-{name}", "wb") as kept:
            kept.write(text)
dist.flight_log(f"rank{rank}/flight.json")
dist.barrier()
if rank == 1:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.chdir("rank1")
    os.abort()
try:
    dist.barrier()
except dist.DistError as error:
    print(error, flush=True)
dist.flight_log("rank0/flight-after.json")
os._exit(3)
"""


@pytest.fixture
def key_file(tmp_path):
    """32 bytes that are no line ends, so that all of them count."""
    path = tmp_path / "run.key"
    path.write_bytes(b"\x01" + secrets.token_bytes(30).replace(b"\n", b"n") + b"\x02")
    path.chmod(0o600)
    return path


def holds(path: Path, needle: bytes) -> bool:
    if path.stat().st_size == 0:
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(needle) >= 0


def forms_of(key: bytes) -> list[bytes]:
    """Whole, and each half: a copy that lost its end is a copy."""
    forms = [key, key[:16], key[16:]]
    for text in (key.hex(), key.hex().upper(), base64.b64encode(key).decode()):
        forms += [text.encode(), text[:20].encode()]
    return forms


def run_job(folder: Path, key_file: Path, mark: bytes) -> subprocess.CompletedProcess:
    script = folder / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "libddp", "run", f"--run-key-file={key_file}"]
    command += ["--nproc-per-node=2", f"--log-dir={folder / 'logs'}", "--tee=3", str(script)]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        timeout=180,
        env={**os.environ, "LIBDDP_LOG_LEVEL": "DEBUG", "MARK": mark.hex()},
    )


@pytest.fixture
def folder(tmp_path):
    """Where the job runs; its core dump, most of a gigabyte, does not stay."""
    folder = tmp_path / "job"
    folder.mkdir()
    yield folder
    for path in folder.rglob("core*"):
        path.unlink()


def test_nothing_that_a_failing_job_leaves_behind_holds_the_key(key_file, folder):
    key, mark = key_file.read_bytes(), secrets.token_bytes(32)
    done = run_job(folder, key_file, mark)
    (folder / "output").write_bytes(done.stdout + done.stderr)
    output = (done.stdout + done.stderr).decode(errors="replace")
    assert "rank 1 (pid" in output, output  # the report of rank 0
    left = [path for path in folder.rglob("*") if path.is_file()]
    cores = [path for path in left if path.name.startswith("core")]
    for form in forms_of(key):
        assert [str(path) for path in left if holds(path, form)] == []
    for path in cores:
        assert holds(path, mark), f"{path} is no dump of the process's memory"
    names = {str(path.relative_to(folder)) for path in left}
    assert {"rank0/self-environ", "rank1/self-cmdline", "rank0/flight-after.json"} <= names
    if not cores:
        pattern = CORE_PATTERN.read_text().strip()
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        is_here = not pattern.startswith(("|", "/")) and hard == resource.RLIM_INFINITY
        assert not is_here, f"no core dump of rank 1: {output}"
        # The rest has been looked at.
        pytest.skip(f"no core dumps here: core_pattern is {pattern!r}, hard limit {hard}")
