#!/usr/bin/env python3
"""Runs the C++ tests of devices (tests/cuda, tests/fakegpu) under a sanitizer, with all of libddp
instrumented and libtorch as it is. Some seven minutes on two cores, most of them the build.

    python tests/sanitize_devices.py thread build/thread-devices
    python tests/sanitize_devices.py address,undefined build/address-devices

ThreadSanitizer sees of libtorch only its calls of the C library: locks, which it needs, but no
reference counts. So what torch frees by its own count looks like a race with torch's own last use.
Such reports, both of whose accesses torch makes itself, are left out; a suppression file cannot say
that, since a frame of torch's is in nearly every stack of autograd's threads.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("libddp_test_fakegpu", "libddp_test_cuda")
#: Modules whose frames say nothing about who makes an access.
RUNTIMES = re.compile(r"\((libtsan|libstdc\+\+|libc|ld-linux[^ ]*)\.so")
TORCH = re.compile(r"\((\S*/)?(libtorch|libc10)\w*\.so")
OPTIONS = {
    # pthread_mutex_clocklock (std::timed_mutex) is not followed before GCC 13.
    "TSAN_OPTIONS": "die_after_fork=0 history_size=7 exitcode=0 report_mutex_bugs=0",
    # What torch keeps until the end is no leak of ours; libddp and the tests share inline symbols.
    "ASAN_OPTIONS": "detect_leaks=0 detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizer", choices=("thread", "address,undefined"))
    parser.add_argument("build", type=Path)
    arguments = parser.parse_args()
    build(arguments.build, arguments.sanitizer)
    logs = (arguments.build / "reports").resolve()
    logs.mkdir(exist_ok=True)
    return max([run(arguments.build / "tests" / name, logs / name) for name in PROGRAMS])


def build(folder: Path, sanitizer: str) -> None:
    options = {
        "Python_EXECUTABLE": sys.executable,
        "LIBDDP_BUILD_TESTS": "ON",
        "LIBDDP_SANITIZE": sanitizer,
        "CMAKE_UNITY_BUILD": "ON",
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *defines], check=True)
    subprocess.run(["ninja", "-C", folder, *PROGRAMS], check=True)


def run(program: Path, log: Path) -> int:
    """1 where a test fails or a report is left."""
    for old in log.parent.glob(f"{log.name}.*"):
        old.unlink()
    given = {
        name: " ".join(filter(None, (options, f"log_path={log}", os.environ.get(name))))
        for name, options in OPTIONS.items()
    }
    # Tests that leave out a wait make the race that a sanitizer is to find.
    ended = subprocess.run(
        [program, "~[drops_waits]"], env={**os.environ, "OMP_NUM_THREADS": "1", **given}
    )
    reports = [text for path in log.parent.glob(f"{log.name}.*") for text in split(path)]
    left = [report for report in reports if not is_of_torch(report)]
    for report in left:
        print(report)
    print(f"{program.name}: {len(left)} reports, and {len(reports) - len(left)} of torch's own")
    return 1 if left or ended.returncode != 0 else 0


def split(path: Path) -> list[str]:
    parts = re.split(r"^={10,}$", path.read_text(errors="replace"), flags=re.MULTILINE)
    return [part.strip() for part in parts if re.search(r"WARNING:|ERROR:|error:", part)]


def is_of_torch(report: str) -> bool:
    """Whether a report is of a data race between two accesses that libtorch makes, or of an
    exception with its last owner, who counts in libstdc++."""
    if "WARNING: ThreadSanitizer: data race" not in report:
        return False
    stacks = [
        frames_of(block)
        for block in report.split("\n\n")
        if re.search(r"^ +(Write|Read|Atomic|Previous)\b.* by ", block, re.MULTILINE)
    ]
    if any("exception_ptr::_M_release" in frame for stack in stacks for frame in stack):
        return True
    known = [stack for stack in stacks if maker_of(stack)]
    return bool(known) and all(is_made_by_torch(stack) for stack in known)


def is_made_by_torch(stack: list[str]) -> bool:
    """Also where its header's reference counts, which are atomic, are compiled into libddp."""
    counts = any("c10::detail::atomic_" in frame for frame in stack[:3])
    return counts or bool(TORCH.search(maker_of(stack)))


def frames_of(block: str) -> list[str]:
    return [line for line in block.splitlines() if re.match(r"\s+#\d+ ", line)]


def maker_of(stack: list[str]) -> str | None:
    """The frame that makes an access, itself or through the C or C++ library."""
    return next((frame for frame in stack if not RUNTIMES.search(frame)), None)


if __name__ == "__main__":
    sys.exit(main())
