"""`libddp run --nnodes=MIN:MAX`: hosts that die, come, wait, and are slow."""

import contextlib
import os
import re
import signal
import time

import pytest
from forked_program import ForkedProgram
from network import Network, run_tool
from run_keys import key_file
from test_hosts_launcher import end

#: Reduces until it is told to end; writes a line per start of rank 0.
JOB = """
import os, sys, time
import torch
import libddp.distributed as dist

folder = sys.argv[1]
dist.init_process_group("libddp")
if dist.get_rank() == 0:
    with open(os.path.join(folder, "starts"), "a") as file:
        print(time.monotonic(), dist.get_world_size(), os.getpid(), file=file)
flag = torch.zeros(1)
while not flag:
    flag[0] = dist.get_rank() == 0 and os.path.exists(os.path.join(folder, "go"))
    dist.all_reduce(flag)
    time.sleep(0.02)
dist.destroy_process_group()
"""

#: The same, whose ranks stay where they are; writes a line per epoch of each rank.
IN_PLACE_JOB = """
import os, sys, time
import torch
import libddp
import libddp.distributed as dist

folder = sys.argv[1]

@libddp.elastic.run
def main():
    dist.init_process_group("libddp")
    with open(os.path.join(folder, "starts"), "a") as file:
        print(time.monotonic(), dist.get_world_size(), dist.get_rank(), os.getpid(),
              libddp.elastic.info().restarts, file=file)
    flag = torch.zeros(1)
    while not flag:
        flag[0] = dist.get_rank() == 0 and os.path.exists(os.path.join(folder, "go"))
        dist.all_reduce(flag)
        time.sleep(0.02)
    dist.destroy_process_group()

main()
"""


#: Trains; what has been made once in a process goes on in all its epochs.
REJOIN_JOB = """
import os, sys, time
import torch
import libddp
import libddp.distributed as dist
from libddp.nn.parallel import DistributedDataParallel
from libddp.optim import AdamW

folder = sys.argv[1]
torch.manual_seed(os.getpid())  # whoever comes has other numbers of its own
kept = {}

@libddp.elastic.run
def main():
    dist.init_process_group("libddp")
    if kept:
        kept["model"].rejoin()
        kept["optimizer"].rejoin()
    else:
        kept["model"] = model = DistributedDataParallel(torch.nn.Linear(64, 64))
        kept["optimizer"] = AdamW(model.parameters(), lr=0.01, shard_over=model)
    model, optimizer = kept["model"], kept["optimizer"]
    # Each rank has a part of the moments, so a copy of them must be on another host.
    snapshot = libddp.Snapshot(os.path.join(folder, "run"), replicas=1, linger=5)
    step = snapshot.load(model, optimizer).get("step", 0)
    if step == 0:
        snapshot.save(0, model, optimizer, extra={"step": 0})
    with open(os.path.join(folder, "starts"), "a") as file:
        print(time.monotonic(), dist.get_world_size(), os.getpid(), id(model), step, file=file)
    flag = torch.zeros(1)
    while not flag:
        flag[0] = dist.get_rank() == 0 and os.path.exists(os.path.join(folder, "go"))
        model(torch.full((4, 64), step % 7 + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        snapshot.save(step, model, optimizer, extra={"step": step})
        dist.all_reduce(flag)
        time.sleep(0.02)
    numbers = torch.cat([p.detach().flatten() for p in model.parameters()])
    with open(os.path.join(folder, "ends"), "a") as file:
        print(step, numbers.double().sum().item().hex(), file=file)
    snapshot.close()
    dist.destroy_process_group()

main()
"""


class Hosts:
    """Launchers on the hosts of a network, and what they print."""

    def __init__(self, net, folder, *flags, job=JOB):
        self.net, self.folder, self.flags = net, folder, flags
        self.launchers, self.stack = {}, contextlib.ExitStack()
        (folder / "train.py").write_text(job)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def start(self, host: int) -> None:
        command = [
            *("--rdzv-backend=c10d", "--rdzv-id=hosts", f"--rdzv-conf=is_host={int(host == 0)}"),
            *(f"--rdzv-endpoint={self.net.addresses[0]}:29400", "--nproc-per-node=1"),
            *(f"--local-addr={self.net.addresses[host]}", *self.flags),
            *(self.folder / "train.py", self.folder),
        ]
        launcher = ForkedProgram(
            ["-m", "libddp", "run", *map(str, command)],
            self.folder,
            {**os.environ, "OMP_NUM_THREADS": "1"},
            self.folder / f"launcher-{host}",
            self.net.hosts[host],
            forks_server=True,
        )
        self.launchers[host] = launcher
        self.stack.callback(end, self.net, host, launcher)

    def said(self, host: int) -> str:
        return (self.folder / f"launcher-{host}").read_text(errors="replace")

    def starts(self) -> list[tuple[float, int]]:
        file = self.folder / "starts"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(float(line.split()[0]), int(line.split()[1])) for line in lines]

    def until(self, condition, seconds: float = 120):
        limit = time.monotonic() + seconds
        while not condition():
            told = "\n".join(f"--- {host}\n{self.said(host)}" for host in self.launchers)
            assert time.monotonic() < limit, f"{self.starts()}\n{told[-6000:]}"
            time.sleep(0.05)

    def go(self, hosts, seconds: float = 120) -> list[int]:
        """Lets the job end; exit statuses."""
        (self.folder / "go").touch()
        return [self.launchers[host].wait(seconds) for host in hosts]


@pytest.mark.parametrize("flags", [[], ["--preload"]], ids=["started", "forked"])
def test_a_host_dies_the_others_go_on_and_another_comes(tmp_path, flags):
    flags = [*flags, "--nnodes=1:2", "--max-restarts=3"]
    with Network(2) as net, Hosts(net, tmp_path, *flags) as hosts:
        hosts.start(0)
        hosts.start(1)
        hosts.until(lambda: [world for _, world in hosts.starts()] == [2])
        time.sleep(1)
        net.cut(1)
        cut = time.monotonic()
        hosts.until(lambda: [world for _, world in hosts.starts()][-1] == 1, 60)
        print(f"host lost to the next start: {hosts.starts()[-1][0] - cut:.1f} s {flags}")
        end(net, 1, hosts.launchers[1])  # what is left of that host
        net.mend(1)
        begin = time.monotonic()
        hosts.start(1)
        hosts.until(lambda: [world for _, world in hosts.starts()][-1] == 2)
        print(f"launcher of a new host to the common start: {hosts.starts()[-1][0] - begin:.1f} s")
        assert hosts.go([0, 1]) == [0, 0], hosts.said(0)[-3000:]


@pytest.mark.parametrize("in_place", [False, True], ids=["agent", "in_place"])
def test_a_host_that_leaves_is_no_failure(tmp_path, in_place):
    """SIGTERM to one launcher: the other goes on, although it may not start again once."""
    flags = ["--nnodes=1:2", "--max-restarts=0", "--preload"]
    flags += ["--in-place", f"--run-key-file={key_file(tmp_path)}"] if in_place else []
    job = IN_PLACE_JOB if in_place else JOB
    with Network(2) as net, Hosts(net, tmp_path, *flags, job=job) as hosts:
        hosts.start(0)
        hosts.start(1)
        hosts.until(lambda: [world for _, world in hosts.starts()][-1:] == [2])
        hosts.launchers[1].terminate()
        left = time.monotonic()
        hosts.until(lambda: [world for _, world in hosts.starts()][-1] == 1, 60)
        print(f"host left to the next start: {hosts.starts()[-1][0] - left:.1f} s")
        assert hosts.launchers[1].wait(60) == 128 + signal.SIGTERM
        assert "another host has left the run" in hosts.said(0), hosts.said(0)[-3000:]
        # A failure is one still, now that nobody has left.
        words = (tmp_path / "starts").read_text().splitlines()[-1].split()
        os.kill(int(words[3 if in_place else 2]), signal.SIGKILL)
        assert hosts.launchers[0].wait(60) == 128 + signal.SIGKILL, hosts.said(0)[-3000:]


def test_ranks_of_all_hosts_stay_in_place(tmp_path):
    flags = ["--in-place", "--preload", "--nnodes=1:2", "--max-restarts=3"]
    with Network(2) as net, Hosts(net, tmp_path, *flags, job=IN_PLACE_JOB) as hosts:

        def newest(number: int) -> list[list[str]]:
            """Of the last epoch, once it has so many ranks: each rank's world, rank, pid, ..."""
            file = tmp_path / "starts"
            lines = [line.split()[1:] for line in file.read_text().splitlines()]
            last = lines[-number:]
            whole = {line[0] for line in last} == {str(number)}
            return last if whole and len({line[1] for line in last}) == number else []

        def pids(number: int) -> dict[str, str]:
            """By rank."""
            return {rank: pid for _, rank, pid, _ in newest(number)}

        hosts.start(0)
        hosts.start(1)
        hosts.until(lambda: len(hosts.starts()) == 2)
        first = pids(2)
        own = {str(child) for child in children_of(hosts.launchers[0].pid)}
        mine = next(rank for rank, pid in first.items() if pid in own)
        other = first["01".replace(mine, "")]

        killed = time.monotonic()
        os.kill(int(other), signal.SIGKILL)
        hosts.until(lambda: len(hosts.starts()) == 4)
        print(f"worker killed to the next epoch: {hosts.starts()[-1][0] - killed:.1f} s")
        second = set(pids(2).values())
        assert first[mine] in second
        assert other not in second

        net.cut(1)
        cut = time.monotonic()
        hosts.until(lambda: [world for _, world in hosts.starts()][-1] == 1, 60)
        print(f"host lost to the next epoch: {hosts.starts()[-1][0] - cut:.1f} s")
        assert newest(1)[0][2] == first[mine]
        end(net, 1, hosts.launchers[1])
        net.mend(1)
        restarts = newest(1)[0][3]
        begin = time.monotonic()
        hosts.start(1)
        hosts.until(lambda: [world for _, world in hosts.starts()][-2:] == [2, 2])
        print(f"launcher of a new host to the epoch: {hosts.starts()[-1][0] - begin:.1f} s")
        assert first[mine] in pids(2).values()
        told = {pid: count for _, _, pid, count in newest(2)}
        assert told[first[mine]] == restarts, "a host that comes was counted as a failure"
        assert hosts.go([0, 1]) == [0, 0], hosts.said(0)[-3000:]


def test_models_outlive_the_hosts_that_come_and_go(tmp_path):
    """Three hosts, two, three: a survivor's objects stay, what comes is given their state."""
    flags = ["--in-place", "--preload", "--nnodes=1:3", "--max-restarts=3"]
    flags.append(f"--run-key-file={key_file(tmp_path)}")
    with Network(3) as net, Hosts(net, tmp_path, *flags, job=REJOIN_JOB) as hosts:

        def worlds() -> list[int]:
            return [world for _, world in hosts.starts()]

        for host in range(3):
            hosts.start(host)
        hosts.until(lambda: worlds() == [3] * 3)
        time.sleep(1)
        net.cut(2)
        hosts.until(lambda: worlds()[-2:] == [2] * 2, 60)
        end(net, 2, hosts.launchers[2])
        net.mend(2)
        hosts.start(2)
        hosts.until(lambda: worlds()[-3:] == [3] * 3)
        assert hosts.go(range(3)) == [0] * 3, hosts.said(0)[-3000:]
    starts = [line.split()[1:] for line in (tmp_path / "starts").read_text().splitlines()]
    first, second, third = ({pid: rest for _, pid, *rest in starts[i:j]} for i, j in
                            ((0, 3), (3, 5), (5, 8)))  # fmt: skip
    assert set(second) < set(first)
    assert set(second) < set(third)
    for pid, (model, step) in second.items():
        assert first[pid][0] == model == third[pid][0], "another object"
        assert 0 < int(step) < int(third[pid][1])
    for epoch in (second, third):
        assert len({step for _, step in epoch.values()}) == 1
    ends = (tmp_path / "ends").read_text().splitlines()
    assert len(ends) == 3
    assert len(set(ends)) == 1, ends


def children_of(pid: int) -> list[int]:
    """All processes below this one."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
            for child in map(int, file.read().split()):
                found += [child, *children_of(child)]
    return found


def test_hosts_beyond_whole_units_are_spares(tmp_path):
    flags = ["--nnodes=2:4", "--node_unit=2", "--max-restarts=3"]
    conf = "last_call_timeout=15"
    with Network(3) as net, Hosts(net, tmp_path, *flags) as hosts:
        for host in range(3):
            hosts.flags = (*flags, f"--rdzv-conf=is_host={int(host == 0)},{conf}")
            hosts.start(host)
        hosts.until(lambda: [world for _, world in hosts.starts()] == [2])
        hosts.until(lambda: any("this host is a spare" in hosts.said(h) for h in range(3)))
        assert hosts.go(range(3)) == [0, 0, 0], hosts.said(0)[-3000:]
        told = [hosts.said(host) for host in range(3)]
        assert sum("the run has ended; this host was a spare" in text for text in told) == 1
        assert sum("3 hosts are there, and --node_unit=2 lets 2 run" in text for text in told) == 1
        assert len(hosts.starts()) == 1


@pytest.mark.parametrize("exclude", [False, True])
def test_a_slow_host_is_named_with_its_figure(tmp_path, exclude):
    flags = ["--nnodes=2:3", "--network-check", *["--exclude-straggler"] * exclude]
    with Network(3) as net, Hosts(net, tmp_path, *flags) as hosts:
        tbf = ["tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"]
        run_tool("tc", "-n", net.hosts[2], "qdisc", "replace", "dev", "eth0", "root", *tbf)
        for host in range(3):
            hosts.start(host)
        hosts.until(lambda: bool(hosts.starts()), seconds=240)
        assert hosts.starts()[0][1] == (2 if exclude else 3)
        assert "network check of 3 hosts: matmul" in "".join(map(hosts.said, range(3)))
        slow = re.search(
            r"this host \([^)]*\) is slow: .*network (\d+) MB/s at best, median (\d+) MB/s",
            hosts.said(2),
        )
        assert slow, hosts.said(2)
        assert int(slow[1]) < 30 < int(slow[2])
        kept = [0, 1] if exclude else [0, 1, 2]
        assert hosts.go(kept) == [0] * len(kept), hosts.said(0)[-3000:]
        if exclude:
            assert hosts.launchers[2].wait(60) == 1
            assert "this host leaves the run (--exclude-straggler)" in hosts.said(2)
