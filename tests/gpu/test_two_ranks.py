"""Two processes on one GPU: NCCL 2.30 or later with NCCL_MULTI_RANK_GPU_ENABLE=1.

Values, parity, and what a killed, frozen or mistaken rank does to the other. Parity is with one
process that computes both ranks' gradients and halves their sum: with two ranks every average is
exact in its order, so fp32 is asked to the bit.
"""

import itertools
import os
import signal
import time

import double_backward
import pytest
import ranks
import torch
import training
from subject import DDP, DEVICE, IS_CUDA, dist, fully_shard

pytestmark = [pytest.mark.launches, pytest.mark.libddp, pytest.mark.limit(100)]
WORLD = 2
HEARTBEAT_S = 3


def run(function, *arguments, **environment):
    """Forked ranks see CUDA as long as nobody before the fork has asked the driver for it."""
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if IS_CUDA else {}
    return ranks.launch(function, WORLD, *arguments, deadline=80, env=variables | environment)


@pytest.fixture(scope="module", autouse=True)
def _two_are_allowed():
    if IS_CUDA and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        pytest.skip("two ranks on one GPU need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")


def join(timeout=None) -> int:
    if IS_CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl" if IS_CUDA else "gloo", timeout=timeout)
    return dist.get_rank()


def full(value, *shape, dtype=torch.float32):
    return torch.full(shape or (5, 3), value, device=DEVICE, dtype=dtype)


# Values.


def collectives():
    rank = join()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for size in (1, 1000, 300_001):
            for is_async in (False, True):
                tensor = full(rank + 1, size, dtype=dtype)
                work = dist.all_reduce(tensor, async_op=is_async)
                if is_async:
                    work.wait()
                assert tensor.eq(3).all(), (dtype, size)
    for op, wanted in (("AVG", 1.5), ("MAX", 2), ("MIN", 1), ("PRODUCT", 2)):
        tensor = full(rank + 1.0)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        assert tensor.eq(wanted).all(), op
    for root in range(WORLD):
        tensor = full(float(rank))
        dist.broadcast(tensor, root)
        assert tensor.eq(root).all()
        dist.reduce(tensor, root)
        assert rank != root or tensor.eq(2 * root).all()
    gathered = full(0.0, 2 * 7)
    dist.all_gather_into_tensor(gathered, full(rank + 1.0, 7))
    assert gathered.tolist() == [1.0] * 7 + [2.0] * 7
    scattered = full(0.0, 7)
    dist.reduce_scatter_tensor(scattered, torch.arange(14.0, device=DEVICE))
    assert scattered.tolist() == [2.0 * (7 * rank + i) for i in range(7)]
    return uneven(rank)


def uneven(rank: int):
    parts = [full(0.0, 2), full(0.0, 5)]
    dist.all_gather(parts, full(rank + 1.0, 2 if rank == 0 else 5))
    assert [part.tolist() for part in parts] == [[1.0] * 2, [2.0] * 5]
    out = full(0.0, 3 + rank)
    sizes = {0: ([1, 2], [1, 2]), 1: ([2, 2], [2, 2])}
    outs, ins = sizes[rank]
    dist.all_to_all_single(out, full(rank + 1.0, sum(ins)), outs, ins)
    assert out.sum().item() == outs[0] * 1 + outs[1] * 2
    if rank == 0:
        dist.send(full(7.0), 1)
    else:
        got = full(0.0)
        dist.recv(got, 0)
        assert got.eq(7).all()
    other = full(0.0)
    pair = [
        dist.P2POp(dist.isend, full(float(rank)), 1 - rank),
        dist.P2POp(dist.irecv, other, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert other.eq(1 - rank).all()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    dist.destroy_process_group()
    return rank


def test_collectives():
    assert ranks.values(run(collectives)) == [0, 1]


def many_in_flight():
    rank = join()
    streams = [torch.cuda.Stream() for _ in range(3)] if IS_CUDA else []
    running = []
    for number in range(200):
        tensor = full(float(number + rank), 1 + number * 37)
        if streams:
            stream = streams[number % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work = dist.all_reduce(tensor, async_op=True)
        else:
            work = dist.all_reduce(tensor, async_op=True)
        running.append((work, tensor, 2.0 * number + 1))
    for work, tensor, wanted in running:
        work.wait()
        assert tensor.eq(wanted).all()
    dist.destroy_process_group()


def test_many_in_flight_on_several_streams():
    ranks.values(run(many_in_flight))


# Parity.


def my_part(tokens: torch.Tensor, rank: int) -> torch.Tensor:
    return tokens.chunk(WORLD)[rank]


def trained(wrap, dtype=None) -> list[float]:
    """Losses of this rank's parts. AdamW goes element by element, so shards step alike."""
    rank = dist.get_rank()
    model = wrap(training.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses = []
    with training.exact():
        for tokens in training.batches(training.STEPS):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
                loss = model(my_part(tokens, rank))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).tolist()


def reference(dtype=None) -> list[float]:
    """Losses of this rank's parts, of a model that has seen both parts."""
    rank, model = dist.get_rank(), training.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses = []
    with training.exact():
        for tokens in training.batches(training.STEPS):
            optimizer.zero_grad()
            for each in range(WORLD):
                with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
                    loss = model(my_part(tokens, each))
                loss.backward()
                if each == rank:
                    losses.append(loss.detach())
            for p in model.parameters():
                p.grad.div_(WORLD)
            optimizer.step()
    return torch.stack(losses).tolist()


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def parity():
    join()
    wanted, found = reference(), {}
    for name, wrap in (("ddp", DDP), ("fully_shard", sharded)):
        found[name] = trained(wrap)
        assert found[name] == wanted, name
    half = trained(DDP, torch.bfloat16)
    training.close(half, reference(torch.bfloat16), 2.0**-7)
    dist.destroy_process_group()
    return wanted


def test_parity_with_one_process_that_does_both():
    one, other = ranks.values(run(parity))
    assert one != other  # each has its own part of the data
    assert one[-1] < one[0]


def twice_through_the_graph():
    rank = join()
    for recomputes, loss in itertools.product(double_backward.PARTS, double_backward.LOSSES):
        models = [double_backward.build(recomputes).to(DEVICE) for _ in range(2)]
        wrapped = DDP(models[0]), double_backward.shard(models[1], fully_shard)
        wanted, found = (double_backward.train(model, loss, rank, DEVICE) for model in wrapped)
        assert len(set(wanted)) == len(wanted)
        training.close(found, wanted, 1e-4)
    dist.destroy_process_group()


def test_gradients_of_gradients():
    """The sharded model's memory stays where it is from one pass to the next."""
    ranks.values(run(twice_through_the_graph))


# Failures.


def steps_until(event):
    """All-reduces until an exception; returns what it was and when."""
    tensor = full(1.0, 100_000)
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 60:
            dist.all_reduce(tensor, async_op=True).wait()
            if IS_CUDA:
                torch.cuda.synchronize()
            tensor.fill_(1)
            event()
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    return "none", "60 s without an exception", time.time()


def goes(how: int) -> tuple:
    """Rank 1 gets a signal in its 20th step."""
    rank = join()
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    count, moment = 0, torch.zeros(1, dtype=torch.float64)

    def event():
        nonlocal count
        count += 1
        if count == 20:
            moment[0] = time.time()
            dist.broadcast(moment, 1)  # rank 0 then knows when
            if rank == 1:
                os.kill(os.getpid(), how)

    name, text, when = steps_until(event)
    again = "none"
    try:
        dist.all_reduce(full(1.0))
        if IS_CUDA:
            torch.cuda.synchronize()
    except Exception as error:
        again = type(error).__name__
    os.kill(pids[1], signal.SIGKILL)  # a stopped process would wait for ever
    return name, text, when - moment.item(), pids[1], again


@pytest.mark.parametrize("how", ["kill -9", "SIGSTOP"])
def test_a_rank_that_goes_is_named(how):
    number = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}[how]
    limit = {"kill -9": 1.0, "SIGSTOP": HEARTBEAT_S + 2.0}[how]
    outcomes = run(goes, int(number), LIBDDP_HEARTBEAT_TIMEOUT=str(HEARTBEAT_S))
    name, text, seconds, pid, again = outcomes[0].value or pytest.fail(outcomes[0].output)
    assert name == "PeerError", text
    assert "rank 1" in text
    assert str(pid) in text
    assert again != "none"
    assert seconds < limit, text


def mistaken(kind: str):
    rank = join()
    dist.all_reduce(full(1.0))
    begin = time.monotonic()
    try:
        if kind == "shape":
            dist.all_reduce(full(1.0, 4 + rank))
        elif kind == "dtype":
            dist.all_reduce(full(1, 4, dtype=torch.float32 if rank else torch.int32))
        elif rank:
            dist.all_reduce(full(1.0))
        else:
            dist.broadcast(full(1.0), 0)
        # NCCL may end both calls, and add up what is no sum.
        while time.monotonic() < begin + 10:
            if IS_CUDA:
                torch.cuda.synchronize()
            dist.all_reduce(full(1.0))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


@pytest.mark.parametrize("kind", ["shape", "dtype", "operation"])
def test_mismatched_calls_are_named_and_do_not_hang(kind):
    words = {"shape": ("[4]", "[5]"), "dtype": ("float32", "int32")}
    for outcome in run(mistaken, kind):
        name, text, seconds = outcome.value or pytest.fail(outcome.output)
        assert name == "PeerError", text
        assert all(word in text for word in words.get(kind, ("all_reduce", "broadcast")))
        assert seconds < 10


def absent():
    from datetime import timedelta

    rank = join(timedelta(seconds=3))
    dist.all_reduce(full(1.0))
    begin = time.monotonic()
    if rank == 1:
        time.sleep(8)
        return None
    try:
        dist.all_reduce(full(1.0), async_op=True).wait()
        if IS_CUDA:
            torch.cuda.synchronize()
        dist.all_reduce(full(1.0))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", 0.0


def test_a_rank_that_does_not_come_is_named():
    name, text, seconds = run(absent)[0].value
    assert name == "TimeoutError", text
    assert "rank 1" in text
    assert 2.5 < seconds < 7
