"""Strangers on the network and on the host: nobody without the run key joins or disturbs a run."""

import contextlib
import os
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
from host_ranks import PORT, launch, run
from network import Network
from strangers import Crowd, listening_ports

#: A long mode for a release: thousands of connections for a minute.
SECONDS = float(os.environ.get("LIBDDP_CROWD_SECONDS", "5"))
IDLE = int(os.environ.get("LIBDDP_CROWD_IDLE", "1000"))
GARBAGE = int(os.environ.get("LIBDDP_CROWD_GARBAGE", "300"))


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "run.key"
    path.write_text(secrets.token_hex(32) + "\n")
    path.chmod(0o600)
    return path


def with_key(path):
    return lambda rank: {"LIBDDP_RUN_KEY_FILE": str(path)}


def own_listeners() -> list[str]:
    """Addresses and ports that this process listens on, as the kernel writes them."""
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            own.add(os.readlink(f"/proc/self/fd/{entry}"))
    places = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                places.append(row[1])
    return places


def kernel_text(address: str, port: int) -> str:
    """How /proc/net/tcp and tcp6 write an address: words of four bytes in the machine's order."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def store_seconds() -> float:
    """CPU time of torch's store, where this process holds it."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().startswith("pt_tcpstore"):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


class Meter:
    """CPU time of this process by phase, without and in the store's thread."""

    def __init__(self):
        self.training, self.store = {}, {}
        self.phase = None

    def enter(self, phase: str | None) -> None:
        """From now on it counts for `phase`."""
        if phase == self.phase:
            return
        store = store_seconds()
        training = time.process_time() - store
        if self.phase is not None:
            for total, now, then in zip(
                (self.training, self.store), (training, store), self.begin, strict=True
            ):
                total[self.phase] = total.get(self.phase, 0) + now - then
        self.phase, self.begin = phase, (training, store)


def count_ranks():
    """Joins, says what it listens on and what its own /proc shows."""
    import libddp.distributed as dist
    import torch

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    shown = Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()
    listeners = own_listeners()
    dist.barrier()
    return int(total.item()), listeners, shown


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_ranks_with_a_key_meet_and_nothing_shows_it(key_file, ipv6):
    key = key_file.read_text().strip()
    with Network(2, ipv6=ipv6) as net:
        outcomes = launch(net, [0, 0, 1], count_ranks, env=with_key(key_file), anew=True)
    for outcome in outcomes:
        assert not outcome.failed, ranks.describe(outcome)
        total, listeners, shown = outcome.value
        assert total == 3
        assert key.encode() not in shown
        assert key not in outcome.output
        assert "no_run_key" not in outcome.output
        # The store of rank 0, at the address that the others know.
        store = kernel_text(net.addresses[0], PORT)
        assert listeners == ([store] if outcome.rank == 0 else [])


def test_without_a_key_there_is_one_warning_and_require_key_makes_it_an_error():
    with Network(2) as net:
        outcomes = launch(net, [0, 0, 1], count_ranks)
        output = "".join(outcome.output for outcome in outcomes)
        assert not any(outcome.failed for outcome in outcomes), output
        assert output.count("event=no_run_key") == 1
        assert "event=no_run_key" in outcomes[0].output
        outcomes = launch(net, [0, 1], count_ranks, env=lambda rank: {"LIBDDP_REQUIRE_KEY": "1"})
    for outcome in outcomes:
        assert outcome.failed
        assert "the ranks are on 2 hosts and there is no run key" in outcome.message
        assert "LIBDDP_RUN_KEY_FILE" in outcome.message


def come_with_another_key():
    from datetime import timedelta

    import libddp.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=4))


def test_a_rank_with_another_key_does_not_join(key_file, tmp_path):
    other = tmp_path / "other.key"
    other.write_bytes(secrets.token_bytes(32) + b"x")
    other.chmod(0o600)
    files = [key_file, other]
    with Network(2) as net:
        outcomes = launch(
            net,
            [0, 1],
            come_with_another_key,
            env=lambda rank: {"LIBDDP_RUN_KEY_FILE": str(files[rank])},
        )
    assert all(outcome.failed for outcome in outcomes)
    # Rank 1 may lose the store, which is rank 0's, a moment before its own time is up.
    assert "event=store_entry_refused" in outcomes[0].output
    assert "rank 1 (never came with this run's key)" in outcomes[0].message


def train_in_a_crowd():
    """Steps until it is told to stop; what they took, and what the process had and has."""
    import libddp.distributed as dist
    import torch
    from libddp.nn.parallel import DistributedDataParallel

    folder = os.environ["RANKS_FOLDER"]
    begin = time.monotonic()
    dist.init_process_group("gloo")
    seconds_to_join = time.monotonic() - begin
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256)] * 4))
    inputs = torch.ones(8, 256)

    def step():
        start = time.monotonic()
        model.zero_grad()
        model(inputs).sum().backward()
        return time.monotonic() - start

    for _ in range(20):
        step()
    open(os.path.join(folder, f"trains-{dist.get_rank()}"), "w").close()
    before = num_descriptors(), resident_mib()
    times = {"crowd": [], "quiet": []}
    new_groups = []
    meter = Meter()
    while True:
        # Rank 0 looks, all agree.
        seen = [os.path.exists(os.path.join(folder, name)) for name in ("stop", "crowd", "join")]
        flags = torch.tensor([float(flag) for flag in seen])
        dist.broadcast(flags, src=0)
        is_over, is_crowded, may_join = (bool(flag) for flag in flags)
        phase = "crowd" if is_crowded else "quiet"
        meter.enter(None if is_over else phase)
        if is_over:
            break
        times[phase].append(step())
        if may_join and len(new_groups) < 3:
            begin = time.monotonic()
            group = dist.new_group(list(range(dist.get_world_size())))
            new_groups.append(time.monotonic() - begin)
            dist.destroy_process_group(group)
            del group
    open(os.path.join(folder, f"leaves-{dist.get_rank()}"), "w").close()
    time.sleep(3)
    total = torch.ones(1)
    dist.all_reduce(total)
    return {
        "total": int(total.item()),
        "join_s": seconds_to_join,
        "new_groups_s": new_groups,
        "steps": {phase: len(taken) for phase, taken in times.items()},
        "step_ms": {p: 1000 * statistics.median(taken) for p, taken in times.items() if taken},
        "cpu_ms_per_step": {p: 1000 * t / len(times[p]) for p, t in meter.training.items()},
        "store_cpu_s": meter.store,
        "descriptors": (before[0], num_descriptors()),
        "resident_mib": (before[1], resident_mib()),
    }


def test_a_crowd_of_strangers_disturbs_neither_start_nor_training(key_file, tmp_path, capsys):
    visits = {}
    with Network(3) as net:

        def surround(folder):
            with Crowd(net, 2, [0, 1], tmp_path, idle=IDLE, garbage=GARBAGE) as crowd:
                wait_for(folder, "trains")
                (folder / "crowd").touch()
                time.sleep(SECONDS / 2)
                (folder / "join").touch()
                time.sleep(SECONDS / 2)
                visits.update(crowd.visits())
            (folder / "crowd").unlink()
            time.sleep(2)
            (folder / "stop").touch()

        results = run(
            net, [0, 1], train_in_a_crowd, env=with_key(key_file), on_start=surround, deadline=120
        )
        assert listening_ports(net, 0) == []
    with capsys.disabled():
        print(f"\ncrowd: {sum(visits.values())} connections to {len(visits)} ports; {results}")
    assert sum(visits.values()) > IDLE
    for rank, result in enumerate(results):
        assert result["total"] == 2
        assert result["steps"]["crowd"] > 0
        assert len(result["new_groups_s"]) == 3
        # The time that a step takes grows with what the crowd takes of the cores; its work hardly.
        cpu = result["cpu_ms_per_step"]
        assert cpu["crowd"] < 2 * cpu["quiet"]
        # The first number of rank 0 holds the crowd, which came to the store before the ranks.
        assert result["descriptors"][1] < 40
        before, after = result["resident_mib"]
        # Rank 0 also holds torch's store, which keeps some 10 KiB for every visitor.
        assert after - before <= 32 + (IDLE / 100 if rank == 0 else 0)


def wait_for(folder, name: str) -> None:
    end = time.monotonic() + 90
    while not all((folder / f"{name}-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.05)


#: As user nobody: everything of the ranks' processes that a user might open or connect to.
PROBE = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
got = []
for pid in sys.argv[1:]:
    for name in ("environ", "mem", "maps", "fd", "map_files"):
        path = f"/proc/{pid}/{name}"
        try:
            os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
            got.append(path)
        except OSError:
            pass
for line in open("/proc/net/unix"):
    name = line.split()[-1]
    if name.startswith("@libddp-") and line.split()[3] == "00010000":
        probe = socket.socket(socket.AF_UNIX)
        probe.settimeout(3)
        probe.connect("\\0" + name[1:])
        try:
            if probe.recv(1):
                got.append(name)
        except OSError:
            pass  # it stands in the queue, and nobody answers
print(got)
"""


def test_another_user_of_the_host_gets_nothing(key_file):
    with Network(1) as net:
        seen = []

        def probe(folder):
            end = time.monotonic() + 60
            while not (folder / "pid-0").exists():
                assert time.monotonic() < end
                time.sleep(0.02)
            time.sleep(0.5)
            done = subprocess.run(
                [*net.inside(0), sys.executable, "-c", PROBE, (folder / "pid-0").read_text()],
                capture_output=True,
                text=True,
                timeout=60,
            )
            seen.append(done.stdout.strip() or done.stderr)
            assert not [name for name in os.listdir("/dev/shm") if name.startswith("libddp")]

        # Rank 1 never comes: rank 0 listens all the time.
        outcomes = launch(
            net, [0, 0], wait_alone, env=with_key(key_file), on_start=probe, deadline=60
        )
    assert seen == ["[]"]
    assert not outcomes[0].failed, outcomes[0].output


def wait_alone():
    from datetime import timedelta

    import libddp.distributed as dist

    if os.environ["RANK"] == "1":
        return
    path = Path(os.environ["RANKS_FOLDER"]) / "pid-0"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    except dist.DistError:
        return
