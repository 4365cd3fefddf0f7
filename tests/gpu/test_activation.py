"""Activation checkpointing on the device: gradients, random numbers, autocast, selective, memory.

A recomputed block runs the kernels of its first run, so gradients equal those without recomputation
to the bit.
"""

import functools

import pytest
import torch
import training
from subject import DDP, DEVICE, IS_LIBDDP, checkpoint
from torch import nn
from torch.nn import functional as F
from training import build, train

if IS_LIBDDP:
    from libddp.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
    from libddp.utils import checkpoint as package
else:
    import torch.utils.checkpoint as package
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers


class Noisy(nn.Module):
    """Draws on the device."""

    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.dropout(F.gelu(self.up(F.dropout(x, 0.3))), 0.3))


def blocks(number=3):
    torch.manual_seed(2)
    return nn.ModuleList(Noisy() for _ in range(number)).to(DEVICE)


def gradients(modules, run, amp=None):
    """Of a pass that draws the same numbers every time."""
    x = torch.linspace(-1, 1, 4 * 64, device=DEVICE).reshape(4, 64).requires_grad_()
    torch.manual_seed(8)
    with torch.autocast(DEVICE.type, amp, enabled=amp is not None):
        y = x
        for module in modules:
            y = run(module, y)
        loss = y.float().square().sum()
    after = torch.rand(3, device=DEVICE)
    found = torch.autograd.grad(loss, [x, *modules.parameters()], materialize_grads=True)
    return [*found, after, torch.rand(3, device=DEVICE)]


def plain(module, x):
    return module(x)


def same(found, wanted):
    assert all(map(torch.equal, found, wanted))


def through_backward(modules, run, amp=None):
    """As `gradients`, by backward(): the reentrant form refuses autograd.grad."""
    x = torch.linspace(-1, 1, 4 * 64, device=DEVICE).reshape(4, 64).requires_grad_()
    torch.manual_seed(8)
    modules.zero_grad()
    with torch.autocast(DEVICE.type, amp, enabled=amp is not None):
        y = x
        for module in modules:
            y = run(module, y)
        y.float().square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in modules.parameters()), torch.rand(3, device=DEVICE)]


@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_same_numbers_are_drawn_again(use_reentrant, amp):
    """Also by the caller afterwards: recomputation leaves the generator where it was."""
    modules = blocks()
    run = functools.partial(checkpoint, use_reentrant=use_reentrant)
    with training.exact():
        same(through_backward(modules, run, amp), through_backward(modules, plain, amp))


def test_autograd_grad():
    modules = blocks()
    with training.exact():
        run = functools.partial(checkpoint, use_reentrant=False)
        same(gradients(modules, run), gradients(modules, plain))


def test_random_state_need_not_be_kept():
    modules = blocks()
    run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    found = through_backward(modules, run)
    assert all(bool(value.isfinite().all()) for value in found)


def test_sequential():
    torch.manual_seed(2)
    net = nn.Sequential(*(Noisy() for _ in range(6))).to(DEVICE)

    def run(module, x):
        return package.checkpoint_sequential(module, 3, x, use_reentrant=False)

    with training.exact():
        wanted = through_backward(nn.ModuleList([net]), plain)
        same(through_backward(nn.ModuleList([net]), run), wanted)


def test_selective():
    """Products are kept, the rest is computed again."""
    products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = functools.partial(package.create_selective_checkpoint_contexts, products)
    run = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    modules = blocks()
    with training.exact():
        same(through_backward(modules, run), through_backward(modules, plain))


@pytest.mark.libddp
def test_modules_by_name():
    modules = blocks()
    with training.exact():
        wanted = through_backward(modules, plain)
        same(through_backward(modules, package.checkpoint_module), wanted)


def test_wrapped_blocks_under_ddp():
    def recomputing(model):
        wrappers.apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(
                wrappers.checkpoint_wrapper, checkpoint_impl=wrappers.CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: isinstance(module, training.Block),
        )
        return model

    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        torch.manual_seed(4)
        wanted = train(build(dropout=0.2), 5)
        torch.manual_seed(4)
        assert train(DDP(recomputing(build(dropout=0.2)), **options), 5) == wanted


@pytest.mark.cuda
def test_several_devices_in_one_block():
    """The host's generator and the device's, both drawn from in a block."""
    host = nn.Linear(8, 8)

    def block(x):
        y = F.dropout(host(x.cpu()), 0.5).to(DEVICE)
        return F.dropout(y, 0.5)

    def pass_of(run):
        torch.manual_seed(3)
        x = torch.ones(4, 8, device=DEVICE, requires_grad=True)
        run(x).square().sum().backward()
        return x.grad

    recomputed = pass_of(lambda x: checkpoint(block, x, use_reentrant=False))
    assert torch.equal(recomputed, pass_of(block))


@pytest.mark.cuda
def test_nothing_synchronises():
    """The state of the device's generator is taken without asking the device."""
    modules = blocks()
    run = functools.partial(checkpoint, use_reentrant=False)
    x = torch.ones(4, 64, device=DEVICE, requires_grad=True)
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            y = x
            for module in modules:
                y = run(module, y)
            y.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_memory_of_a_pass():
    """Of 12 blocks, beyond gradients: the inputs of all and the inside of one."""
    torch.manual_seed(2)
    modules = nn.ModuleList(Noisy(1024) for _ in range(12)).to(DEVICE)
    x = torch.randn(2048, 1024, device=DEVICE)

    def peak(run):
        y = x
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        for module in modules:
            y = run(module, y)
        y.sum().backward()
        return torch.cuda.max_memory_allocated() - begin

    run = functools.partial(checkpoint, use_reentrant=False)
    for each in (plain, run):
        peak(each)  # gradients are there from now on
    whole, recomputed = peak(plain), peak(run)
    import torch.utils.checkpoint as torchs

    theirs = peak(functools.partial(torchs.checkpoint, use_reentrant=False))
    assert recomputed < whole / 2
    assert recomputed <= theirs * 1.02
