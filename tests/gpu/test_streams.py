"""Streams: what runs behind what, what blocks nobody, whose memory lives how long, CUDA graphs.

On one rank an all-reduce in place moves nothing, so order is seen in all-gathers, which copy. A
kernel that sleeps makes a stream late: what is not ordered behind it reads too early.
"""

import random
import time

import pytest
import torch
from subject import DEVICE, dist

pytestmark = pytest.mark.cuda
#: Device cycles: about 0.2 s and 20 ms.
LONG, SHORT = 400_000_000, 40_000_000
NUMEL = 1 << 18


def full(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), float(value), device=DEVICE)


def late(tensor: torch.Tensor, value: float, cycles: int = SHORT) -> torch.Tensor:
    """Gets its value only when the current stream has slept."""
    torch.cuda._sleep(cycles)
    return tensor.fill_(value)


def gather(out: torch.Tensor, tensor: torch.Tensor, is_async: bool = True):
    return dist.all_gather_into_tensor(out, tensor, async_op=is_async)


@pytest.fixture(autouse=True)
def _warm():
    """The communicator is made, and sleeping kernels are loaded."""
    gather(full(0), full(0)).wait()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_behind_the_current_stream(is_async):
    out, tensor = full(0), full(0)
    late(tensor, 3)
    work = gather(out, tensor, is_async)
    if is_async:
        work.wait()
    assert out.eq(3).all()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_behind_a_side_stream(is_async):
    side, out, tensor = torch.cuda.Stream(), full(0), full(0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late(tensor, 4)
        work = gather(out, tensor, is_async)
        if is_async:
            work.wait()
        twice = out * 2
    torch.cuda.current_stream().wait_stream(side)
    assert twice.eq(8).all()


def test_wait_orders_the_stream_in_which_it_is_called():
    side, out, tensor = torch.cuda.Stream(), full(0), full(0)
    late(tensor, 5)
    work = gather(out, tensor)
    with torch.cuda.stream(side):
        work.wait()
        seen = out.clone()
    side.synchronize()
    assert seen.eq(5).all()


def test_the_host_is_not_blocked():
    out, tensor = full(0), full(0)
    begin = time.perf_counter()
    late(tensor, 6, LONG)
    work = gather(out, tensor)
    work.wait()
    gather(full(0), out, is_async=False)
    took = time.perf_counter() - begin
    assert not work.is_completed()
    torch.cuda.synchronize()
    slept = time.perf_counter() - begin
    assert work.is_completed()
    assert took < slept / 2


def test_the_current_stream_is_not_blocked_before_wait():
    """A collective behind a slow stream, and a computation beside it."""
    side, out, tensor, other = torch.cuda.Stream(), full(0), full(0), full(1)
    end = torch.cuda.Event()
    with torch.cuda.stream(side):
        late(tensor, 7, LONG)
        work = gather(out, tensor)
    other.mul_(2)
    end.record()
    end.synchronize()
    assert not work.is_completed()
    work.wait()
    assert out.eq(7).all()


def behind_a_late_collective() -> object:
    """From here on the group's stream is late, and the current one is not."""
    side, tensor = torch.cuda.Stream(), full(0)
    with torch.cuda.stream(side):
        late(tensor, 1, LONG)
        return gather(full(0), tensor), side


@pytest.mark.parametrize("keeps_work", [True, False], ids=["kept", "dropped"])
def test_memory_of_freed_tensors_is_not_used_again_too_early(keeps_work):
    behind = behind_a_late_collective()
    out, tensor = full(0), full(8)
    torch.cuda.current_stream().synchronize()
    work = gather(out, tensor)
    place = tensor.data_ptr()
    del tensor
    if not keeps_work:
        del work
    garbage = [full(-1) for _ in range(8)]  # at once, on a stream that is not late
    if keeps_work:
        assert place not in [g.data_ptr() for g in garbage]
        work.wait()
    torch.cuda.synchronize()
    assert out.eq(8).all()
    del behind


def test_memory_comes_back():
    """Neither works nor streams keep tensors once they are done."""

    def many():
        for _ in range(20):
            gather(full(0), full(1)).wait()
            gather(full(0), full(1))  # nobody waits for this one
        dist.barrier()
        torch.cuda.synchronize()

    many()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        many()
        time.sleep(0.1)  # what nobody waits for comes back within the watchdog's period
    end = time.monotonic() + 5
    while torch.cuda.memory_allocated() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.max_memory_allocated() <= before + 100 * NUMEL * 4


def test_random_programs_on_several_streams():
    """Each result is checked on the stream that waited for it; 300 collectives, 4 streams."""
    draw = random.Random(1)
    streams = [torch.cuda.Stream() for _ in range(4)]
    running, checks = [], []
    for number in range(300):
        with torch.cuda.stream(draw.choice(streams)):
            if draw.random() < 0.2:
                torch.cuda._sleep(draw.randrange(1_000_000))
            tensor = torch.full((draw.randrange(1, 20_000),), float(number), device=DEVICE)
            out = torch.zeros_like(tensor)
            if draw.random() < 0.3:
                gather(out, tensor, is_async=False)
                checks.append(out.eq(number).all())
            else:
                running.append((gather(out, tensor), out, number))
            del tensor
            if len(running) > 8:
                work, out, wanted = running.pop(draw.randrange(len(running)))
                work.wait()
                checks.append(out.eq(wanted).all())
    for work, out, wanted in running:
        work.wait()
        checks.append(out.eq(wanted).all())
    torch.cuda.synchronize()
    assert all(bool(check) for check in checks)


def test_nothing_synchronises_through_torch():
    out, tensor = full(0), full(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            gather(out, tensor, is_async=False)
            gather(out, tensor).wait()
            dist.all_reduce(tensor)
            dist.reduce_scatter_tensor(out, tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_captured_in_a_graph(is_async):
    out, tensor = full(0), full(1)

    def program():
        work = gather(out, tensor, is_async)
        if is_async:
            work.wait()
        dist.all_reduce(out)
        out.mul_(2)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        program()  # as torch asks for: once outside
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program()
    for value in (3, 4):
        tensor.fill_(value)
        graph.replay()
        assert out.eq(2 * value).all()
    gather(out, tensor).wait()  # and outside of the graph, as before
    assert out.eq(4).all()


def test_a_training_step_in_a_graph():
    """DDP whole, with its buckets: as torch allows it."""
    from subject import DDP

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    torch.manual_seed(1)
    side = torch.cuda.Stream()
    x = torch.randn(16, 32, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = DDP(torch.nn.Linear(32, 32).to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        for _ in range(12):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = model.module.weight.detach().clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(before, model.module.weight)
    assert model.module.weight.isfinite().all()
