"""Nothing decides by the wall clock, which may be wrong, or jump."""

import re

import tree

CPP_WALL_CLOCK = re.compile(
    r"system_clock|high_resolution_clock|CLOCK_REALTIME|gettimeofday|std::time\b|wait_until\("
)
PYTHON_WALL_CLOCK = re.compile(r"\btime\.time\(|datetime\.(now|utcnow)\(")
#: They only write it down.
WRITERS = {
    "libddp/base/log.cpp",
    "libddp/watchdog/flight_log_json.cpp",
    "python/libddp/_last_words.py",
}
#: Hand torch a time of its own kind: its rendezvous ends a last call by the wall clock.
TORCHS = {"python/libddp/_torch_patches/rendezvous_delays.py"}


def users(pattern: re.Pattern, *places: tuple[str, str]) -> set[str]:
    return {
        path
        for suffix, folder in places
        for path in tree.files(suffix, under=folder)
        if pattern.search(tree.read(path))
    }


def test_the_library_reads_monotonic_clocks():
    places = [(s, f) for s in (".h", ".cpp") for f in ("libddp/", "bindings/")]
    assert users(CPP_WALL_CLOCK, *places) <= WRITERS


def test_the_python_package_does_too():
    assert users(PYTHON_WALL_CLOCK, (".py", "python/libddp/")) <= WRITERS | TORCHS
