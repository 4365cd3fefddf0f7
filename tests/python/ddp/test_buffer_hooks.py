"""Hooks that keep buffers alike, in the place of the broadcast."""

import os

import checks
import ddp_models as models
import pytest
import torch
import torch.distributed as dist
from ddp_models import wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

RANK = int(os.environ.get("RANK", 0))


def x(rank=None):
    generator = torch.Generator().manual_seed(20 + (RANK if rank is None else rank))
    return torch.randn(4, 16, generator=generator)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value):
        self.count = self.count + RANK + 1
        return {"out": (self.layer(value), None)}


def sum_buffers(state, buffers):
    state.append(sorted(buffers))
    for buffer in buffers.values():
        dist.all_reduce(buffer)


def counts(ddp_class, location, steps=3):
    """The buffer after each step, summed over the ranks by a hook."""
    group = {"process_group": models.gloo()} if ddp_class is TorchDDP else {}
    model = ddp_class(Counter(), **group)
    model._register_buffer_comm_hook(calls := [], sum_buffers, location)
    seen = []
    for _ in range(steps):
        model(x())["out"][0].sum().backward()
        seen.append(model.module.count.item())
    return seen, calls


def check_buffer_hooks_as_in_torch():
    for location in Location:
        assert counts(models.libddp_ddp(), location) == counts(TorchDDP, location)


def check_buffer_hooks_that_return_futures():
    def hook(state, buffers):
        works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers.values()]
        return [work.get_future().then(lambda f: state.append("done")) for work in works]

    model = wrap(Counter())
    model._register_buffer_comm_hook(done := [], hook)
    loss = model(x())["out"][0].sum()
    loss.backward()
    assert done == ["done"]
    assert model.module.count == 3
    with torch.no_grad():  # no backward will come: complete when forward returns
        model(x())
    assert done == ["done"] * 2
    model(x())
    model(x())["out"][0].sum().backward()
    assert len(done) >= 3
    assert model._buffer_futures == []


def check_a_future_that_fails_fails_the_backward_pass():
    def hook(state, buffers):
        future = torch.futures.Future()
        future.set_exception(KeyError("lost"))
        return future

    model = wrap(Counter())
    model._register_buffer_comm_hook(None, hook)
    with pytest.raises(Exception, match="lost"):
        model(x())["out"][0].sum().backward()
    model.buffer_hook = None
    model._syncs_before = True
    model(x())["out"][0].sum().backward()


def check_buffer_hooks_have_rules():
    model = wrap(Counter())
    with pytest.raises(TypeError, match="hook must be callable, got int"):
        model._register_buffer_comm_hook(None, 1)
    with pytest.raises(ValueError, match="PRE_FORWARD or POST_FORWARD"):
        model._register_buffer_comm_hook(None, sum_buffers, "before")
    model._register_buffer_comm_hook([], sum_buffers)
    with pytest.raises(RuntimeError, match="cannot join uneven inputs"):
        model.join()


def check_new_buffers_are_found():
    model = models.wrap_in_torchs_place(Counter())
    model.module.register_buffer("late", torch.tensor(float(RANK)))
    assert sorted(model.named_module_buffers) == ["count", "late"]
    assert len(model.modules_buffers) == 2
    model(x())
    assert model.module.late == 0
    model._default_broadcast_coalesced([model.module.late.fill_(RANK)], 10, 1)
    assert model.module.late == 1


results, test_on_every_rank = checks.suite(globals(), 2)
