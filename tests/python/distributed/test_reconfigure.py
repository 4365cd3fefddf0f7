"""torch's fault-tolerance API: members of a group die, join and change, and it goes on."""

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import drop_in
import pytest
import ranks
import torch
import torch.distributed as dist
from libddp.distributed import _init
from libddp.errors import ArgumentError, StateError
from libddp.nn import parallel as ddp_nn

from libddp import distributed as ddp_dist

CAN = _init._CAN_RECONFIGURE
needs_torch = pytest.mark.skipif(not CAN, reason="this torch has no reconfigure")
#: Far above what it takes, and below the deadline of the ranks: who waits for whom is an error.
TIMEOUT = timedelta(seconds=90)


def out_of_band():
    """How the processes tell each other their handles: the store that ranks.run holds."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def begin(store=None, init=ddp_dist.init_process_group, **more):
    """A group without members, over a store that nobody else has."""
    more = {"backend": "libddp", "rank": 0, "world_size": 1, "timeout": TIMEOUT, **more}
    init(store=store or dist.HashStore(), enable_reconfigure=True, **more)


class Round:
    """What a launcher does: collects the handles of those who shall be in, and a uuid."""

    def __init__(self, box):
        self.box, self.number = box, 0

    def handles(self, who):
        """The handle of each of `who` (numbers of ranks.run), by this round's number."""
        self.number += 1
        mine = dist._get_reconfigure_handle()
        me = int(os.environ["RANK"])
        self.box.set(f"{self.number}/{me}", mine)
        found = [self.box.get(f"{self.number}/{each}").decode() for each in who]
        assert found[who.index(me)] == mine
        return found

    def meet(self, who, **more):
        handles = self.handles(who)
        return dist._reconfigure(100 + self.number, handles, timeout=TIMEOUT, **more).wait()


def total():
    """The sum over the members of their numbers in ranks.run, and what torch says of the group."""
    tensor = torch.full((1000,), float(os.environ["RANK"]))
    dist.all_reduce(tensor)
    assert tensor.unique().numel() == 1
    return tensor[0].item(), dist.get_rank(), dist.get_world_size()


def weights(ddp=torch.nn.parallel.DistributedDataParallel, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    wrapped = ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(6, 8)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def a_life(backend):
    """Three processes, of which one is killed, and a fourth that joins the two that are left."""
    me = int(os.environ["RANK"])
    box = out_of_band()
    if backend == "gloo":  # torch's: all processes start over one store, with different ranks
        shared = dist.PrefixStore("gloo", out_of_band())
        begin(shared, dist.init_process_group, backend="gloo", rank=me, world_size=4)
    else:
        begin(init=dist.init_process_group)
    assert dist._supports_reconfigure()
    with pytest.raises(Exception, match=r"Call reconfigure\(\) before issuing collectives"):
        dist.all_reduce(torch.ones(1))
    rounds, seen = Round(box), {}
    if me < 3:
        rounds.meet([2, 0, 1])
        seen["first"] = total()
        seen["weights of three"] = weights()
        if me == 1:
            box.wait(["pending/0", "pending/2"])  # a group that has failed refuses further calls
            os.kill(os.getpid(), signal.SIGKILL)
        pending = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        box.set(f"pending/{me}", "")
        rounds.meet([0, 2])
        with pytest.raises(Exception):  # noqa: B017  libddp's own words: below
            pending.wait()
        seen["shrunk"] = total()
        seen["weights of two"] = weights()
    else:
        rounds.number = 2
    rounds.meet([3, 0, 2])
    seen["grown"] = total()
    seen["weights of three, again"] = weights()
    dist.destroy_process_group()
    return seen


def lives_of(backend, tries, **env):
    """What each of those that are not killed has seen, of one of so many tries.

    torch's Gloo may hang: members were still connecting where another one was done.
    """
    told = []
    for _ in range(tries):
        outcomes = ranks.launch(a_life, 4, backend, env=env)
        left = {i: outcomes[i] for i in (0, 2, 3)}
        if outcomes[1].returncode == -signal.SIGKILL and not any(o.failed for o in left.values()):
            return {i: outcome.value for i, outcome in left.items()}
        told += [backend, *map(ranks.describe, outcomes)]
    raise AssertionError("\n".join(told))


@needs_torch
def test_a_group_shrinks_and_grows_as_gloos_does():
    ours = lives_of("libddp", 1, LIBDDP_LOG_LEVEL="info")
    theirs = lives_of("gloo", drop_in.GLOO_TRIES)
    assert [ours[i]["first"] for i in (2, 0)] == [(3.0, 0, 3), (3.0, 1, 3)]
    assert [ours[i]["shrunk"] for i in (0, 2)] == [(2.0, 0, 2), (2.0, 1, 2)]
    assert [ours[i]["grown"] for i in (3, 0, 2)] == [(5.0, 0, 3), (5.0, 1, 3), (5.0, 2, 3)]
    for i, seen in ours.items():
        for what, value in seen.items():
            if not what.startswith("weights"):
                assert value == theirs[i][what], (i, what)
                continue
            # Two addends have one sum; of three, Gloo adds in another order.
            tolerance = {"rtol": 0, "atol": 0} if what.endswith("two") else {}
            for mine, other in zip(value, theirs[i][what], strict=True):
                torch.testing.assert_close(mine, other, **tolerance)


def refused(error, *words, call=None, soon=30.0):
    began = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert time.monotonic() - began < soon
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def reconfigure(uuid, handles, timeout=60, **more):
    return lambda: dist._reconfigure(uuid, handles, timeout=timedelta(seconds=timeout), **more)


def fields(handle):
    """The fields of a handle, each with its length in front."""
    head, rest = handle.split(" ")[:2], handle.split(" ", 2)[2]
    found = []
    while rest:
        size, rest = rest.split(":", 1)
        found.append(rest[: int(size)])
        rest = rest[int(size) + 1 :]
    return head, found


def handle_of(head, found):
    return " ".join([*head, *(f"{len(each)}:{each}" for each in found)])


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_own_mistakes(mine, leaver):
    """What is wrong with the arguments of one process is told before anything has changed."""
    refused(ValueError, "0 handles", call=reconfigure(1, []))
    refused(ValueError, "own handle is not among", call=reconfigure(1, [leaver]))
    refused(ValueError, "unique", f"pid {os.getpid()}", call=reconfigure(1, [mine, mine]))
    head, found = fields(mine)
    assert handle_of(head, found) == mine
    named = handle_of(head, [found[0], "localhost", *found[2:]])
    other = mine.replace("member-1", "member-7")
    for wrong in (
        "",
        "gloo:0:-1:0:127.0.0.1:1",
        mine[:-1],
        mine + " ",
        other,
        named,
        "\x1b[2J",
        "x" * 9999,
    ):
        refused(
            ValueError, "handles[1]", "no reconfigure handle", call=reconfigure(1, [mine, wrong])
        )
    refused(ValueError, "knows none", call=reconfigure(1, [mine], hints={"a": "b"}))
    refused(ValueError, "greater than zero", call=reconfigure(1, [mine], timeout=-1))


def check_disagreements(me, rounds, pair):
    """Members that do not want the same all learn it, and soon."""
    rounds.handles([0, 1])
    words = "different reconfigures", "uuid 10", "uuid 11"
    refused(dist.DistBackendError, *words, call=reconfigure(10 + me, pair))
    words = "no members since reconfigure(uuid=1", "different reconfigures"
    refused(dist.DistError, *words, call=lambda: dist.all_reduce(torch.ones(1)))
    rounds.handles([0, 1])
    order = pair if me == 0 else pair[::-1]
    refused(dist.DistBackendError, "another order", call=reconfigure(12, order))
    rounds.handles([0, 1])


def check_absent_members(me, rounds, mine, pair, leaver):
    """One that lives and does not come, one that has ended, and one that has ended elsewhere."""
    never = "rank 1 (never came)"
    refused(dist.DistNetworkError, never, call=reconfigure(13, [mine, leaver], timeout=2))
    rounds.handles([0, 1])
    rounds.box.set("third may go", "")
    pid = int(rounds.box.get("third's pid"))
    end = time.monotonic() + 60
    while not has_ended(pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    call = reconfigure(14, [*pair, leaver])
    refused(dist.DistBackendError, "rank 2", f"pid {pid}", "has ended", call=call, soon=15.0)
    head, found = fields(leaver)
    elsewhere = handle_of(head, [*found[:-1], "another machine"])
    words = [never] if mine < elsewhere else [f"pid {pid}", "holds the store"]
    refused(dist.DistNetworkError, *words, call=reconfigure(15, [mine, elsewhere], timeout=3))


def errors():
    """Each wrong call is an error that says what is wrong, and the group goes on after it."""
    me = int(os.environ["RANK"])
    begin(backend="gloo")  # as libddp.distributed understands it
    rounds = Round(out_of_band())
    handles = rounds.handles([0, 1, 2])
    if me == 2:
        rounds.box.set("third's pid", str(os.getpid()))
        rounds.box.get("third may go")
        return "left without a word"
    mine, pair, leaver = handles[me], handles[:2], handles[2]
    layer = torch.nn.Linear(2, 2)
    for call in (
        lambda: ddp_dist.all_reduce(torch.ones(1)),
        lambda: ddp_nn.DistributedDataParallel(layer),
    ):
        refused(StateError, "Call reconfigure()", call=call)
    check_own_mistakes(mine, leaver)

    # Alone, and what has been made over that membership.
    dist._reconfigure(2, {mine}).wait()
    assert total() == (float(me), 0, 1)
    alone = ddp_nn.DistributedDataParallel(layer)
    alone(torch.ones(1, 2)).sum().backward()
    refused(ValueError, "used that uuid before", call=reconfigure(2, [mine]))
    assert total() == (float(me), 0, 1)  # the refusal has changed nothing

    check_disagreements(me, rounds, pair)
    check_absent_members(me, rounds, mine, pair, leaver)

    # After all that: the two that are left.
    rounds.handles([0, 1])
    dist._reconfigure(16, set(pair)).wait()
    assert total()[::2] == (1.0, 2)
    words = "other members since reconfigure(uuid=1", "made again"
    refused(StateError, *words, call=lambda: alone(torch.ones(1, 2)).sum().backward())
    ours = weights(ddp_nn.DistributedDataParallel)
    assert all(a.equal(b) for a, b in zip(ours, weights(), strict=True))

    # What is in flight when the members change, and objects from before.
    rounds.handles([0, 1])
    dist._reconfigure(17, pair).wait()
    old = ddp_nn.DistributedDataParallel(torch.nn.Linear(2, 2))
    torchs = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    pending = dist.irecv(torch.zeros(4), src=1 - me)
    rounds.handles([0, 1])
    dist._reconfigure(18, pair[::-1]).wait()
    assert total() == (1.0, 1 - me, 2)
    refused(Exception, "reconfigure(uuid=18)", call=pending.wait)
    words = "other members since reconfigure(uuid=18)", "made again"
    refused(StateError, *words, call=lambda: old(torch.ones(1, 2)).sum().backward())
    torchs(torch.full((1, 2), float(me))).sum().backward()  # asks torch's group, which goes on
    assert torchs.module.weight.grad.eq(0.5).all()
    dist.destroy_process_group()
    return "went on"


@needs_torch
def test_every_mistake_is_told_and_the_group_goes_on():
    outcomes = ranks.launch(errors, 3)
    assert [outcome.value for outcome in outcomes[:2]] == ["went on"] * 2, "\n".join(
        map(ranks.describe, outcomes)
    )
    assert outcomes[2].value == "left without a word"


def settled(count, end):
    """What `count()` says once it says the same for a while: threads end a moment later."""
    found = count()
    for _ in range(20):
        time.sleep(0.05)
        gc.collect()
        found = min(found, count())
    assert time.monotonic() < end
    return found


def resources():
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    maps = sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return descriptors, threads, maps


def twenty_times(num_hosts):
    """Three processes; each round has another order or other members; hosts are simulated."""
    me = int(os.environ["RANK"])
    os.environ["LIBDDP_HOST_ID"] = str(me % num_hosts)
    begin(init=dist.init_process_group)
    rounds, seen, end = Round(out_of_band()), {}, time.monotonic() + 300
    ticks = []
    threading.Thread(target=lambda: [ticks.append(time.sleep(0.01)) for _ in range(100)]).start()
    for turn in range(22):
        who = [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 2, 0]][turn % 4]
        who = who[:2] if turn % 4 == 3 else who  # without process 0
        if me not in who:
            rounds.number += 1
            continue
        rounds.meet(who)
        for _ in range(3):
            assert total() == (float(sum(who)), who.index(me), len(who))
        tensor = torch.full((4,), float(me))
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
            assert tensor.eq(who[0]).all()
        dist.barrier()
        if turn in (1, 21):
            seen[turn] = [settled(lambda i=i: resources()[i], end) for i in range(3)]
            dist.barrier()
    assert len(ticks) > 0  # Python goes on while a process waits for the others
    dist.destroy_process_group()
    return seen[1], seen[21]


@needs_torch
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_twenty_reconfigures_leave_nothing(num_hosts, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    more = {"LIBDDP_RUN_KEY_FILE": str(key), "LIBDDP_REQUIRE_KEY": "1", "MASTER_ADDR": ""}
    for early, late in ranks.run(twenty_times, 3, num_hosts, env=more, deadline=300):
        assert late == early


def stay():
    """A group that was made without it says so, and refuses."""
    ddp_dist.init_process_group("gloo")
    answer = not hasattr(dist, "_supports_reconfigure") or dist._supports_reconfigure()
    if CAN:
        refused(dist.DistError, "enable_reconfigure=True", call=dist._get_reconfigure_handle)
    ddp_dist.destroy_process_group()
    return answer


def test_a_group_made_without_it_has_members_that_stay():
    assert ranks.run(stay, 1) == [not CAN]


def test_a_torch_without_it_is_named(monkeypatch):
    monkeypatch.setattr(_init, "_CAN_RECONFIGURE", False)
    with pytest.raises(
        ArgumentError, match=rf"needs a torch .* and this is {torch.__version__.split('+')[0]}"
    ):
        begin()
    assert not dist.is_initialized()
