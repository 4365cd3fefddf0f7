"""The process group of these tests, what they run on, and what is written down of each.

    LIBDDP_GPU_TEST_DEVICE=cpu pytest tests/gpu        # finds mistakes in the tests themselves
    LIBDDP_GPU_TEST_LIBRARY=torch pytest tests/gpu     # the same, of torch's own classes

Without a GPU and without these variables all tests are skipped. With LIBDDP_GPU_RECORD each result
goes into that file at once; tests that it names are left out, so that a file can be started again
behind a test that hung. A test that takes longer than LIMIT_S ends the process, with the stacks of
all threads; so does one that leaves the device broken, since all after it would fail too.
"""

import faulthandler
import json
import os
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench"), str(HERE.parent / "python" / "support")]

# Read when cuBLAS starts: sums in one order, so that parity can be asked to the bit.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LIMIT_S = 60
#: Exit statuses: a test hung, a test broke the device.
HUNG, BROKEN = 86, 87
RECORD = os.environ.get("LIBDDP_GPU_RECORD")


def record(**line) -> None:
    if RECORD:
        with open(RECORD, "a") as file:
            file.write(json.dumps(line) + "\n")


def begun() -> set[str]:
    if not RECORD or not Path(RECORD).exists():
        return set()
    return {json.loads(line)["test"] for line in Path(RECORD).read_text().splitlines()}


def pytest_collection_modifyitems(config, items):
    import subject

    done = begun()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        reason = subject.missing(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A thread of its own watches: the test may hang where no signal handler runs."""
    record(test=item.nodeid)
    watch = threading.Timer(limit_of(item), end_process, [HUNG])
    watch.daemon = True
    watch.start()
    try:
        return (yield)
    finally:
        watch.cancel()


def limit_of(item) -> float:
    marker = item.get_closest_marker("limit")
    return marker.args[0] if marker else LIMIT_S


def end_process(status: int) -> None:
    faulthandler.dump_traceback(sys.__stderr__)
    os._exit(status)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        message = str(report.longrepr or "")
        if report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2].removeprefix("Skipped: ")
        seconds = round(report.duration, 2)
        line = {"outcome": report.outcome, "seconds": seconds, "message": message[-4000:]}
        record(test=report.nodeid, **line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        import subject

        if not subject.device_works():
            report.sections.append(("device", "CUDA does not work any more after this test"))
            pytest_runtest_logreport(report)
            print(report.longreprtext, file=sys.__stderr__, flush=True)
            os._exit(BROKEN)
    return report


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: makes sense on CUDA alone")
    config.addinivalue_line("markers", "libddp: about names or promises that torch does not have")
    config.addinivalue_line(
        "markers", "launches: starts processes of its own, which make the group"
    )
    config.addinivalue_line("markers", "limit(seconds): in the place of LIMIT_S")


def pytest_terminal_summary(terminalreporter):
    import subject

    if subject.nothing_here():
        terminalreporter.write_line("SKIPPED: all of tests/gpu needs a GPU", red=True, bold=True)


@pytest.fixture(scope="session")
def group():
    """The default group, of one rank."""
    import subject

    subject.start()
    yield
    subject.stop()


@pytest.fixture(autouse=True)
def _in_the_group(request):
    if request.node.get_closest_marker("launches") is None:
        request.getfixturevalue("group")


@pytest.fixture(autouse=True)
def _same_numbers():
    """What an earlier test has drawn or switched on has no effect."""
    import torch

    torch.manual_seed(1)
    yield
    torch.use_deterministic_algorithms(False)
