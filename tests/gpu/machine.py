"""What a run ran on: device, driver, versions, commit. Asked in processes of their own."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys

from steps import ROOT

FACTS = """
import json, torch
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "none"}
if torch.cuda.is_available():
    facts["device"] = torch.cuda.get_device_name(0)
    facts["devices"] = torch.cuda.device_count()
    facts["memory_GiB"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
print(json.dumps(facts))
"""
#: Of the library that a process gets when it loads torch's.
NCCL = """
import ctypes, torch
version = ctypes.c_int()
try:
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
except OSError:
    pass
print(version.value)
"""


def ask(program: str, environment: dict[str, str] | None = None) -> str:
    """What the program prints, or "" where it fails."""
    command = [sys.executable, "-c", program]
    return output(command, {**os.environ, **(environment or {})}).strip()


def output(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def nccl_version(environment: dict[str, str] | None = None) -> tuple[int, ...]:
    """(2, 28, 9); () where there is none."""
    code = int(ask(NCCL, environment) or 0)
    return (code // 10000, code // 100 % 100, code % 100) if code else ()


def facts() -> dict:
    """One flat dict; what cannot be found out is left out."""
    found = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
    found |= json.loads(ask(FACTS) or "{}")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = output(query).splitlines()
    found["driver"] = driver[0].strip() if driver else "none"
    found["nccl"] = ".".join(map(str, nccl_version())) or "none"
    found["python"] = platform.python_version()
    found["cores"] = os.cpu_count()
    # A copy of the sources may have no history; then whoever copied them says which they are.
    head = output(["git", "rev-parse", "--short", "HEAD"]).strip()
    dirty = "-dirty" if head and output(["git", "status", "--porcelain"]).strip() else ""
    found["commit"] = os.environ.get("LIBDDP_GPU_COMMIT") or (head + dirty) or "unknown"
    return found
