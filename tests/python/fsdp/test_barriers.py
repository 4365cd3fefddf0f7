"""No rank changes parameters that another one still reads, whatever a script does with them.

One rank is slowed down at a place where it is about to read; the other one goes on and writes.
"""

import time

import checks
import fsdp_models as models
import torch
import torch.distributed as dist
from torch import nn

SLOW_S = 0.3


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def build(frozen=False):
    model = models.build(Layers)
    model.blocks[0].requires_grad_(not frozen)
    return model


def data():
    return torch.linspace(-1, 1, 512).view(2, 256).requires_grad_()


def wraps(frozen=False):
    return (
        lambda: models.shard(build(frozen)),
        lambda: models.wrap(build(frozen), auto_wrap_policy=None),
    )


def dawdle(*_):
    if dist.get_rank() == 1:
        time.sleep(SLOW_S)


def assert_same(found, wanted):
    """On every rank alike, so that what follows finds them together."""
    worst = (found - wanted).abs().max().detach()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    assert worst == 0, f"a rank is off by {worst}"


def slow_forward(model):
    """Rank 1 reads the second block late."""
    block = model.blocks[1]
    block.register_forward_pre_hook(dawdle)


def overwrite(model):
    """As an average of weights is swapped in or out."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def check_parameters_written_after_a_forward_under_grad():
    wanted = build()(data())
    for wrap in wraps():
        model = wrap()
        slow_forward(model)
        found = model(data())
        overwrite(model)
        assert_same(found, wanted)


def check_an_optimizer_that_steps_after_a_forward_under_grad():
    wanted = build()(data())
    for wrap in wraps():
        model = wrap()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(data()).sum().backward()
        slow_forward(model)
        found = model(data())
        optimizer.step()
        assert_same(found, wanted)


def gradient_of_input(model, write, slow=False):
    x = data()
    y = model(x)
    if slow:
        y.register_hook(dawdle)
    (found,) = torch.autograd.grad(y.sum(), x)
    write(model)
    return found


def check_parameters_written_after_gradients_of_inputs():
    plain = build()
    wanted = gradient_of_input(plain, overwrite)
    for wrap in wraps():
        found = gradient_of_input(wrap(), overwrite, slow=True)
        assert_same(found, wanted)


def gradient_of_a_pass(model, slow=False):
    """Parameters are overwritten as soon as the pass has ended on this rank."""
    x = data()
    if slow:
        model.blocks[0].register_full_backward_pre_hook(dawdle)
    model(x).sum().backward()
    overwrite(model)
    return x.grad


def check_parameters_written_after_a_pass_past_frozen_ones():
    """The first block's parameters are needed after the last average has come."""
    wanted = gradient_of_a_pass(build(frozen=True))
    for wrap in wraps(frozen=True):
        found = gradient_of_a_pass(wrap(), slow=True)
        assert_same(found, wanted)


def check_parameters_written_after_a_pass_without_averages():
    wanted = gradient_of_a_pass(build())
    for wrap in wraps():
        model = wrap()
        if hasattr(model, "no_sync"):
            with model.no_sync():
                found = gradient_of_a_pass(model, slow=True)
        else:
            model.set_requires_gradient_sync(False)
            found = gradient_of_a_pass(model, slow=True)
        assert_same(found, wanted)


def check_parameters_written_in_backward():
    """An optimizer per parameter, while the other rank is still in the same pass."""

    def run(model, slow=False):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.5)
            parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step())
        if slow:
            for block in model.blocks:
                block.register_full_backward_pre_hook(dawdle)
        x = data()
        model(x).sum().backward()
        return x.grad

    wanted = run(build())
    for wrap in wraps():
        found = run(wrap(), slow=True)
        assert_same(found, wanted)


results, test_barriers = checks.suite(globals(), 2)
