"""`libddp run`: its own defaults, and the end of a job by a signal."""

import os
import signal
import subprocess
import sys
import time

import pytest

from libddp import run


def test_the_launcher_takes_a_free_port_unless_a_rendezvous_is_named():
    assert run.parse(["--nproc-per-node=2", "train.py", "--lr", "1"]).standalone
    args = run.parse(["--nproc_per_node=2", "train.py", "--lr", "1"])
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1"])
    assert not run.parse(["--master-port=29501", "train.py"]).standalone
    assert not run.parse(["--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "train.py"]).standalone
    assert not run.parse(["--nnodes=2", "train.py"]).standalone


def test_the_launcher_shares_out_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert run.threads_per_worker(1) == cores
    assert run.threads_per_worker(4 * cores) == 1


def test_run_starts_ranks_that_find_each_other(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys, torch\n"
        "from libddp.distributed import all_reduce, destroy_process_group, init_process_group\n"
        "init_process_group('gloo')\n"
        "t = torch.ones(1); all_reduce(t)\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(\n"
        "    f\"{t.item()} {os.environ['OMP_NUM_THREADS']}\")\n"
        "destroy_process_group()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "libddp", "run", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    threads = run.threads_per_worker(2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == [f"2.0 {threads}"] * 2


WAITER = """
import os, signal, sys, time
import libddp.distributed as dist
dist.init_process_group("libddp")
dist.barrier()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of its own
path = os.path.join(sys.argv[1], os.environ["RANK"])
open(path + ".new", "w").write(str(os.getpid()))
os.rename(path + ".new", path)
time.sleep(300)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_without_a_traceback(tmp_path, number):
    script = tmp_path / "job.py"
    script.write_text(WAITER)
    command = [sys.executable, "-m", "libddp", "run", "--nproc-per-node=2", str(script)]
    agent = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"))
        pids = [int((tmp_path / rank).read_text()) for rank in "01"]
        agent.send_signal(number)
        _, errors = agent.communicate(timeout=90)
    finally:
        agent.kill()
        agent.wait()
    assert agent.returncode == 128 + number, errors
    assert f"libddp run: ended by {number.name}" in errors
    assert "Traceback" not in errors
    wait_until(lambda: not any(map(is_alive, pids)))
