"""Mistakes of a user: every rank hears which parameter and which rank, and training can go on."""

import os
import re
from datetime import timedelta
from pathlib import Path

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import Mlp
from torch import nn
from usage import assert_agree, compare, data, gradients, ours, parameters

RANK = int(os.environ.get("RANK", 0))
#: Far above what a loaded machine needs for a step.
SHORT = timedelta(seconds=4)


def expect(kind, match):
    from libddp import errors

    return pytest.raises(getattr(errors, kind), match=match)


def own_group(timeout=None):
    """A group that a check may ruin."""
    from libddp.distributed import new_group

    return new_group([0, 1], timeout=timeout)


def step(model, value=None):
    model.zero_grad()
    model(data(2) if value is None else value).sum().backward()


def assert_the_group_works():
    model = ours(Mlp(1))
    step(model)
    assert_agree(gradients(model))


class InOrder(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))


class Counted(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = Mlp(1)
        self.inner.register_buffer("count", torch.zeros(size))


#: What rank r wraps, and what all ranks read about it.
DIFFERENT = [
    (lambda r: InOrder(["one", "other"][r : r + 1]), "rank 1 has parameter 'other.weight'"),
    (lambda r: Mlp(2, 16 + r), r"rank 1 has parameter 'layers.0.weight' Float \[17, 17\]"),
    (lambda r: Mlp(2).to([torch.float32, torch.float64][r]), "'layers.0.weight' Double"),
    (lambda r: InOrder("ab" if r else "ba"), "rank 1 has .* 'a.weight'.*rank 0 has .* 'b.weight'"),
    (lambda r: Mlp(2 + r), r"rank 1 has parameter 'layers.2.weight' Float \[16, 16\]"),
    (lambda r: Mlp(3 - r), r"rank 0 has parameter 'layers.2.weight' Float \[16, 16\]"),
    (lambda r: Mlp(2, frozen=r), "rank 1 has .*'layers.0.weight'.*requires_grad=false, rank 0"),
    (lambda r: Mlp(2, frozen=2 * r), "rank 1 has .*'layers.0.weight'.*requires_grad=false"),
    (lambda r: Counted(1 + r), r"rank 1 has buffer 'inner.count' Float \[2\], rank 0 has buffer"),
    (lambda r: Mlp(2).to(["cpu", "meta"][r]), "rank 1 has parameter 'layers.0.weight'.* on meta"),
]


def check_models_that_differ():
    for build, difference in DIFFERENT:
        with expect("ArgumentError", difference) as caught:
            ours(build(RANK))
        text = str(caught.value)
        assert f"rank {RANK}/2] DistributedDataParallel: the ranks wrap different models" in text
        assert "Hint: build the model from the same configuration" in text
        assert_the_group_works()


def check_models_that_differ_unchecked():
    """Without init_sync the first bucket tells."""
    model = ours(Mlp(2, 16 + RANK), init_sync=False, process_group=own_group())
    with expect("PeerError", r"rank 0 called .*\(layers.1.bias.*rank 1 called .*\(layers.1.bias"):
        step(model, data(2, 16 + RANK))
    assert_the_group_works()


def check_parameters_on_a_device_without_data():
    with expect("ArgumentError", "parameter 'layers.0.weight' is on meta.*Hint: move the model"):
        ours(Mlp(2).to("meta"))
    model = ours(Mlp(2))
    model.to("meta")  # other parameters from now on
    with expect("StateError", r"4 of 4.*'layers.0.weight' \(all ranks\).*replaced after wrapping"):
        step(model, data(2).to("meta"))
    assert_the_group_works()


def resize(layer):
    layer.weight.data = torch.ones(8, 16)
    layer.bias.data = torch.ones(8)


def replace(layer):
    layer.weight = nn.Parameter(torch.ones(16, 16))


CHANGES = [
    (resize, r"parameter 'layers.1.weight' had shape \[16, 16\] .* has shape \[8, 16\] now"),
]


def check_changes_on_all_ranks():
    for change, match in CHANGES:
        model = ours(Mlp(2))
        change(model.module.layers[1])
        with expect("ArgumentError", match) as caught:
            step(model)
        assert f"rank {RANK}/2] forward" in str(caught.value)
        assert "Hint: " in str(caught.value)
        assert_the_group_works()


def fails_on_rank_1(model, own_error, step=step):
    """Rank 1 gets `own_error` and leaves, as the end of its process would; rank 0 is told."""
    from libddp.distributed import destroy_process_group

    if RANK == 1:
        with own_error:
            step(model)
        destroy_process_group(model.process_group)
    else:
        with expect("PeerError", "rank 1") as caught:
            step(model)
        assert caught.value.peer_rank == 1
        assert "layers." in str(caught.value)  # the bucket that waited
    assert_the_group_works()


def check_changes_on_one_rank():
    for change, match in CHANGES:
        model = ours(Mlp(2), process_group=own_group())
        if RANK == 1:
            change(model.module.layers[1])
        fails_on_rank_1(model, expect("ArgumentError", match))


def check_replaced_on_one_rank():
    model = ours(Mlp(2))
    if RANK == 1:
        replace(model.module.layers[1])
    for _ in range(2):
        with expect("StateError", r"1 of 4.*no gradient: 'layers.1.weight' \(rank 1\)\. Hint"):
            step(model)
    again = ours(model.module)
    step(again)
    assert_agree(gradients(again))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no gradient today")


class FailingOnRank1(Mlp):
    """`where`: the layer whose input's backward raises, or "forward"."""

    def __init__(self, where):
        super().__init__(4)
        self.where = where

    def forward(self, value):
        for index, layer in enumerate([*self.layers, nn.Identity()]):
            if RANK == 1 and self.where == "forward" and index == 2:
                raise ArithmeticError("no output today")
            if RANK == 1 and self.where == index:
                value = Failing.apply(value)
            value = torch.tanh(layer(value))
        return value


def check_a_rank_that_raises():
    for where, text in (("forward", "no output"), (4, "no gradient"), (2, "no gradient")):
        model = ours(FailingOnRank1(where), bucket_cap_mb=0.001, process_group=own_group())
        fails_on_rank_1(model, pytest.raises(ArithmeticError, match=text))


def check_a_pass_that_ended_midway_is_not_forgotten():
    """All ranks fail alike after some buckets have been sent: the copies of the model differ."""
    model = ours(Mlp(4), bucket_cap_mb=0.001)

    def explode(gradient):
        raise ArithmeticError("in a hook")

    handle = model.module.layers[1].weight.register_hook(explode)
    with pytest.raises(ArithmeticError):
        step(model)
    handle.remove()
    with expect("StateError", r"rank \d/2] forward: .* ended early, after \d of \d buckets.*Hint"):
        step(model)
    net = model.module
    del model
    again = ours(net)
    step(again)
    assert_agree(gradients(again))


def interleaved(wrap):
    """A step of the optimizer between two losses' forwards and the second one's backward."""
    model = wrap(Mlp(3), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(data(2)).sum(), model(data(2)).pow(2).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    for _ in range(2):
        optimizer.zero_grad()
        model(data(2)).sum().backward()
        optimizer.step()
    return parameters(model)


def check_a_step_between_forward_and_backward():
    assert_agree(compare(interleaved))


def answer(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def hooked(on_rank_1):
    model = ours(Mlp(2), process_group=own_group())
    model.register_comm_hook(
        None, lambda state, bucket: (on_rank_1 if RANK else answer)(bucket.buffer())
    )
    return model


def check_hooks_that_return_no_future():
    for on_rank_1, what in ((lambda buffer: None, "None"), (lambda buffer: buffer, "a Tensor")):
        text = rf"hook .*lambda.* returned {what} for bucket 0\. Hint: return a torch.futures"
        fails_on_rank_1(hooked(on_rank_1), pytest.raises(TypeError, match=text))


def check_a_hook_with_another_dtype_or_shape():
    """As long as the number of elements is right, the values are what counts, as in torch."""
    for change in (torch.Tensor.double, lambda buffer: buffer.clone().view(1, -1)):
        model = hooked(lambda buffer, change=change: answer(change(buffer)))
        step(model, torch.ones(2, 16))
        assert model.module.layers[0].weight.grad.dtype is torch.float32
        assert_agree(gradients(model))


def out_of_data(net, what):
    """Rank 1 has a batch less, and no join."""
    model = ours(net, process_group=own_group(SHORT))
    for _ in range(2):
        step(model)
    if RANK == 0:
        with expect("TimeoutError", rf"{what}.*timed out after .* s waiting for rank 1.*Hint"):
            step(model)
    dist.barrier()
    assert_the_group_works()


def check_a_rank_that_runs_out_of_data():
    out_of_data(Mlp(2), r"rank 0/2] all_reduce #\d+ .*\(layers.1.bias, ...\)")
    out_of_data(nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4)), r"broadcast #\d+ .*\(buffers\)")


def leftovers():
    return {p.name for p in Path("/dev/shm").iterdir() if re.search("libddp", p.name)}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left():
    before = leftovers()
    yield
    assert leftovers() <= before


results, test_every_rank_is_told = checks.suite(globals(), 2)
