"""Bad networks: slow, lossy, stalling ones change no bit of a result and kill nobody."""

import hashlib
import os
import time
from pathlib import Path

from host_ranks import launch, run
from network import Network
from rough_network import RoughNetwork, Wire

MBIT = 1e6 / 8
#: What the wire is like in each phase, and for how long nothing gets through at its start.
PHASES = {
    "clean": (Wire(), 0.0),
    "a stall of 200 ms": (Wire(), 0.2),
    "a stall of 1.5 s": (Wire(), 1.5),
    "20 +- 10 ms of delay": (Wire(delay=0.02, jitter=0.01), 0.0),
    "1 % of loss": (Wire(loss=0.01), 0.0),
    "packets out of order": (Wire(reorder=0.1), 0.0),
    "10 Mbit/s": (Wire(rate=10 * MBIT), 0.0),
}
FOLDER = "RANKS_FOLDER"


def wait_for(paths, *, unless=lambda: False) -> None:
    end = time.monotonic() + 90
    while not all(path.exists() for path in paths) and not unless():
        assert time.monotonic() < end, f"waited too long for {paths}"
        time.sleep(0.005)


def digest_of_everything(dist, rank, world) -> str:
    """Collectives and messages of this rank's numbers, as a hash of all that came out."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    digest = hashlib.sha256()

    def note(tensor):
        digest.update(tensor.numpy().tobytes())

    for count in (3, 60_000):
        total = torch.randn(count * world, generator=generator)
        block = torch.empty(count)
        dist.reduce_scatter_tensor(block, total)
        note(block)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        note(total)
        gathered = torch.empty(count * world)
        dist.all_gather_into_tensor(gathered, block)
        note(gathered)
        dist.broadcast(gathered, src=world - 1)
        note(gathered)
        got = torch.empty(count)
        works = [dist.irecv(got, (rank - 1) % world), dist.isend(block, (rank + 1) % world)]
        for work in works:
            work.wait()
        note(got)
        dist.barrier()
    return digest.hexdigest()


def digest_each_phase():
    import libddp.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ[FOLDER])
    digests = []
    for number in range(len(PHASES)):
        wait_for([folder / f"go-{number}"])
        digests.append(digest_of_everything(dist, rank, world))
        (folder / f"done-{number}-{rank}").touch()
    dist.destroy_process_group()
    return digests


def test_a_bad_network_changes_no_result_and_ends_nothing():
    hosts = [0, 0, 1]
    with RoughNetwork(2) as net:

        def conduct(folder):
            for number, (wire, stall) in enumerate(PHASES.values()):
                net.wire = wire
                net.stall(stall)
                (folder / f"go-{number}").touch()
                wait_for(
                    [folder / f"done-{number}-{rank}" for rank in range(len(hosts))],
                    # A rank that has failed: `run` says why.
                    unless=lambda: any(folder.glob("result-*")),
                )

        outcomes = run(net, hosts, digest_each_phase, on_start=conduct)
    for digests in outcomes:
        assert dict(zip(PHASES, digests, strict=True)) == dict.fromkeys(PHASES, digests[0])


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure_traffic():
    """Bytes that this host sent in each operation over 8 MiB, and the sums' greatest errors."""
    import libddp.distributed as dist
    import torch

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = 2 << 20
    inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    exact = torch.stack(inputs).double().sum(0)
    magnitude = torch.stack(inputs).abs().double().sum(0)
    reduced, block = inputs[rank].clone(), torch.empty(numel // world)
    traffic, errors = {}, {}
    calls = {
        "all_reduce": lambda: dist.all_reduce(reduced),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(block, inputs[rank]),
    }
    for name, call in calls.items():
        dist.barrier()
        before = sent_bytes()
        call()
        dist.barrier()  # the peers have all of it
        traffic[name] = sent_bytes() - before
    errors["all_reduce"] = ((reduced - exact).abs() / magnitude).max().item()
    mine = exact.chunk(world)[rank]
    errors["reduce_scatter"] = ((block - mine).abs() / magnitude.chunk(world)[rank]).max().item()
    digest = hashlib.sha256(reduced.numpy().tobytes()).hexdigest()
    dist.destroy_process_group()
    return traffic, errors, digest


def check_traffic(net, wire_dtype: str, tolerance: float, bytes_of: dict) -> None:
    env = {"LIBDDP_WIRE_DTYPE": wire_dtype, "LIBDDP_SOCKETS_PER_LINK": "2"}
    results = run(net, [0, 1], measure_traffic, env=lambda rank: env)
    assert len({digest for _, _, digest in results}) == 1
    for traffic, errors, _ in results:
        assert max(errors.values()) < tolerance, errors
        for name, wanted in bytes_of.items():
            # Headers of TCP and acknowledgements; the control connection's signs of life.
            assert wanted <= traffic[name] <= wanted * 1.1, (name, traffic)


def test_bytes_on_the_wire_by_operation_and_wire_dtype():
    with Network(2) as net:
        size = 8 << 20
        check_traffic(net, "float32", 1e-6, {"all_reduce": size, "reduce_scatter": size // 2})
        check_traffic(
            net, "bfloat16", 1 / 128, {"all_reduce": size // 2, "reduce_scatter": size // 4}
        )


def time_all_reduce():
    import libddp.distributed as dist
    import torch

    dist.init_process_group("gloo")
    tensor = torch.ones(2 << 20)
    dist.all_reduce(tensor)
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(tensor)
    dist.barrier()
    seconds = time.monotonic() - start
    dist.destroy_process_group()
    return seconds, tensor.eq(4).all().item()


def test_a_capped_network_is_used_well():
    with Network(2) as net:
        net.cap("100mbit")
        for seconds, is_right in run(net, [0, 1], time_all_reduce):
            assert is_right
            # 8 MiB at 100 Mbit/s; tbf lets a burst through and other tests load the machine.
            assert 0.8 * 0.67 < seconds < 1.5 * 0.67 + 1


def meet_with_own_settings():
    import libddp.distributed as dist

    dist.init_process_group("gloo")


def test_ranks_that_disagree_about_the_links():
    with Network(2) as net:
        outcomes = launch(
            net,
            [0, 1],
            meet_with_own_settings,
            env=lambda rank: {"LIBDDP_SOCKETS_PER_LINK": str(rank + 1)},
        )
    for outcome in outcomes:
        assert outcome.failed
        for rank in (0, 1):
            assert f"rank {rank} (pid " in outcome.message, outcome.output
            assert f"sockets_per_link={rank + 1} " in outcome.message


def use_the_links_after(seconds):
    """What a collective or a message says after a pause, and how long that took."""
    import libddp.distributed as dist
    import torch

    dist.init_process_group("gloo")
    peer = 1 - dist.get_rank()
    dist.all_reduce(torch.ones(100_000))
    works = [dist.irecv(torch.empty(4), peer), dist.isend(torch.ones(4), peer)]
    for work in works:
        work.wait()
    time.sleep(seconds)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(100_000))
    except dist.DistNetworkError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def test_a_firewall_that_forgot_the_links_is_named_on_both_sides():
    with RoughNetwork(2) as net:
        net.forget_after = 2.5
        outcomes = launch(net, [0, 1], use_the_links_after, 4.5, deadline=100)
    for outcome in outcomes:
        assert not outcome.failed, outcome.output
        message, seconds = outcome.value
        for word in ("the network ", "firewall", "10.77.0.1:", "10.77.0.2:"):
            assert word in message, message
        assert seconds < 60  # nine on an idle machine


def test_idle_links_are_kept_in_a_firewalls_memory():
    with RoughNetwork(2) as net:
        net.forget_after = 9.0
        values = run(net, [0, 1], use_the_links_after, 12.0, deadline=100)
    assert [message for message, _ in values] == ["", ""]
