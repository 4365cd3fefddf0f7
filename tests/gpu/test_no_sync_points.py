"""What a step costs beyond its arithmetic: nothing waits, nothing is copied to the host, memory
neither grows nor is more than torch needs."""

import time

import pytest
import torch
import training
from subject import DDP, DEVICE, FSDP, IS_LIBDDP, fully_shard
from torch.profiler import ProfilerActivity, profile
from training import build

pytestmark = pytest.mark.cuda
#: Calls by which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMalloc")


def plain():
    return build()


def replicated(**options):
    return DDP(build(), **options)


def by_module():
    model = build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def by_wrapper():
    needs = {} if IS_LIBDDP else {"use_orig_params": True}
    return FSDP(build(), auto_wrap_policy=training.policy(), device_id=DEVICE, **needs)


MODELS = {
    "ddp": replicated,
    "ddp, unused": lambda: replicated(find_unused_parameters=True),
    "ddp, static": lambda: replicated(static_graph=True),
    "fully_shard": by_module,
    "fsdp": by_wrapper,
}


class Loop:
    """Steps whose tokens are on the device already."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.tokens = list(training.batches(4))

    def steps(self, number: int) -> None:
        for step in range(number):
            self.model(self.tokens[step % 4]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_no_synchronisation_in_a_step(name):
    loop = Loop(MODELS[name]())
    loop.steps(4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.steps(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MODELS)
def test_the_runtime_is_not_asked_to_wait(name):
    """What c10's debug mode does not see: calls of libraries below it."""
    loop = Loop(MODELS[name]())
    loop.steps(6)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        loop.steps(3)
    names = [event.name for event in watched.events()]
    # The profiler ends with one of its own.
    found = [n for n in names if n.startswith(WAITS) and n != "cudaDeviceSynchronize"]
    assert not found
    assert names.count("cudaDeviceSynchronize") <= 1
    assert not [n for n in names if "Memcpy DtoH" in n]


@pytest.mark.parametrize("name", MODELS)
def test_memory_does_not_grow(name):
    loop = Loop(MODELS[name]())
    loop.steps(8)
    torch.cuda.synchronize()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    loop.steps(4)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    for _ in range(5):
        loop.steps(8)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= used
    assert torch.cuda.memory_reserved() <= reserved
    assert torch.cuda.max_memory_allocated() <= peak


def peak_of(make) -> int:
    """Bytes beyond what was there, of a model's life and four steps."""
    import gc

    gc.collect()
    torch.cuda.synchronize()
    time.sleep(0.1)  # what was in flight is let go of within the watchdog's period
    torch.cuda.empty_cache()
    begin = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loop = Loop(make())
    loop.steps(2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()  # of steps alone: building may hold a second copy
    loop.steps(2)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - begin


def test_memory_of_fully_shard_is_at_most_torchs():
    from test_fsdp import torchs

    peak_of(by_module), peak_of(torchs)
    assert peak_of(by_module) <= peak_of(torchs)


def test_memory_of_ddp_is_at_most_torchs():
    from test_ddp import torchs

    def theirs():
        return torchs(gradient_as_bucket_view=True)

    peak_of(replicated), peak_of(theirs)
    assert peak_of(replicated) <= peak_of(theirs)


def test_memory_comes_back_with_the_model():
    import gc

    for make in MODELS.values():
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loop = Loop(make())
        loop.steps(4)
        torch.cuda.synchronize()
        del loop
        gc.collect()
        assert torch.cuda.memory_allocated() <= before, make
