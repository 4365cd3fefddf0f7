"""What goes wrong between hosts: every rank names the culprit, soon."""

import os
import signal
import time

from host_ranks import launch, run
from network import Network, ip


def lose_a_rank():
    """The last rank is killed in the middle of training; the others say what they learned."""
    import libddp.distributed as dist
    import torch

    dist.init_process_group("gloo")
    dist.barrier()
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start


def test_a_killed_rank_of_another_host_is_named():
    with Network(2) as net:
        outcomes = launch(net, [0, 0, 1, 1], lose_a_rank)
    assert outcomes[3].returncode == -signal.SIGKILL
    for outcome in outcomes[:3]:
        assert not outcome.failed, outcome.output
        message, seconds = outcome.value
        assert "rank 3 (pid " in message
        assert "died" in message or "reached" in message, message
        assert seconds < 30  # a second on an idle machine


def wait_for_a_lost_host():
    import libddp.distributed as dist
    import torch

    dist.init_process_group("gloo")
    dist.barrier()
    folder = os.environ["RANKS_FOLDER"]
    open(os.path.join(folder, f"ready-{dist.get_rank()}"), "w").close()
    if dist.get_rank() == 1:
        time.sleep(120)  # its own end of the wire; ended with the test
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(8))
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start


def test_a_host_whose_cable_is_pulled_is_named_long_before_the_timeout():
    with Network(2) as net:

        def pull(folder):
            end = time.monotonic() + 90
            while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
                assert time.monotonic() < end, "the ranks did not start"
                time.sleep(0.05)
            net.cut(1)
            while not (folder / "result-0").exists() and time.monotonic() < end:
                time.sleep(0.05)
            # Rank 1 sleeps; it has told what it had to.
            (folder / "stop").touch()

        outcomes = launch(net, [0, 1], wait_for_a_lost_host, deadline=5, on_start=pull)
    assert not outcomes[0].failed, outcomes[0].output
    message, seconds = outcomes[0].value
    assert "rank 1 (pid " in message
    assert "no sign of life" in message, message
    assert seconds < 60  # five on an idle machine


def meet():
    import libddp.distributed as dist

    dist.init_process_group("gloo")


def test_hosts_that_cannot_reach_each_other():
    with Network(2) as net:
        net.add_lonely_interface(0, "dark0", "10.99.0.1/24")
        outcomes = launch(
            net,
            [0, 1],
            meet,
            env=lambda rank: {"LIBDDP_SOCKET_IFNAME": "dark"} if rank == 0 else {},
        )
    for outcome in outcomes:
        assert outcome.failed
        assert "cannot reach rank 0 (pid " in outcome.message, outcome.output
        assert "(interface dark0) at 10.99.0.1:" in outcome.message
        assert "(interface eth0, 10.77.0.2)" in outcome.message
        assert "Network is unreachable" in outcome.message


def test_an_interface_that_does_not_exist():
    with Network(2) as net:
        outcomes = launch(net, [0, 1], meet, env=lambda rank: {"NCCL_SOCKET_IFNAME": f"ib{rank}"})
    for outcome in outcomes:
        assert outcome.failed
        assert "_SOCKET_IFNAME='ib" in outcome.message, outcome.output
        assert "eth0 (10.77.0." in outcome.message


def meet_over_a_file():
    import libddp.distributed as dist

    store = os.path.join(os.environ["RANKS_FOLDER"], "store")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def test_hosts_that_have_no_address_but_a_link_local_one():
    with Network(2) as net:
        for host in net.hosts:
            ip("-n", host, "addr", "flush", "dev", "eth0", "scope", "global")
        outcomes = launch(net, [0, 1], meet_over_a_file)
    for outcome in outcomes:
        assert outcome.failed
        assert "no address at which other hosts could reach it" in outcome.message, outcome.output
        assert "lo (127.0.0.1, loopback)" in outcome.message
        assert "eth0 (fe80::" in outcome.message
        assert "link-local" in outcome.message


def test_machines_that_share_a_boot_id_are_told_apart():
    with Network(1) as net:
        values = run(net, [0, 0], name_the_backend, env=lambda rank: {"LIBDDP_HOST_ID": f"m{rank}"})
        assert values == ["hosts", "hosts"]
        assert run(net, [0, 0], name_the_backend) == ["host", "host"]


def name_the_backend():
    import libddp.distributed as dist
    from libddp.distributed._groups import native

    dist.init_process_group("gloo")
    return native().backend_name()
