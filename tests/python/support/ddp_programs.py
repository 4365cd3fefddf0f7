"""Random programs for DistributedDataParallel, ours and torch's own on Gloo on the CPU.

ddp_programs.run(seed)                             # both on the CPU, after each call bit for bit
ddp_programs.run(seed, device=torch.device("fakegpu", rank), static_graph=True)
"""

from __future__ import annotations

import random

import ddp_models as models
import random_scripts
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

CPU = torch.device("cpu")
#: Passes whose parameters count as used for torch in the next one, though they are cleared.
ALONE = ["backward_without_sync", "backward_of_a_part", "gradients_by_hand"]
#: What torch's reducer has no place for when it has seen its graph, or before.
NOT_STATIC = ["backward_of_a_part", "gradients_by_hand", "backward_of_the_second_forward"]
NOT_STATIC += ["backward_without_sync", "accumulate"]


class Branches(nn.Module):
    """Each head is used by some passes, buffers change in each, one parameter is used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)  # no gradient that is all rounding
        self.conv.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, heads):
        x = torch.tanh(self.trunk(self.norm(self.conv(x).mean(dim=(2, 3)))))
        for head in heads:
            x = torch.tanh(self.heads[head](x)) * self.scale
        return x


class Script(random_scripts.Script):
    """
    Args:
        make_optimizer: of the wrapped model.
        all_heads: each pass uses each head.
    """

    def __init__(self, ddp_class, make_optimizer, all_heads=True, device=CPU, **arguments):
        torch.manual_seed(3)
        model = ddp_class(Branches().to(device), bucket_cap_mb=0.0001, **arguments)
        super().__init__(model, make_optimizer(model))
        self._all_heads, self._device = all_heads, device

    def _loss(self, draw):
        """On data of this rank, with a choice of heads that may be this rank's."""
        mine = random.Random(draw.random() + (dist.get_rank() if draw.random() < 0.5 else 0))
        heads = [head for head in range(3) if self._all_heads or mine.random() < 0.6]
        data = torch.Generator().manual_seed(draw.randrange(1000) + 1000 * dist.get_rank())
        images = torch.randn(3, 2, 4, 4, generator=data).to(self._device)
        return self.model(images, heads).square().mean()

    def backward_without_sync(self, draw):
        with self.model.no_sync():
            self.backward(draw)

    def accumulate(self, draw):
        for _ in range(draw.randrange(1, 3)):
            self.backward_without_sync(draw)
        self.backward(draw)

    def backward_of_a_part(self, draw):
        if some := self._some(draw):
            with self.model.no_sync():
                self._loss(draw).backward(inputs=some)

    def backward_of_the_second_forward(self, draw):
        self._loss(draw)
        self.backward(draw)

    def gradients_by_hand(self, draw):
        with self.model.no_sync():
            torch.autograd.grad(self._loss(draw), self.parameters, allow_unused=True)

    def give(self, draw):
        for parameter in self._some(draw):
            parameter.grad = torch.full_like(parameter, 0.25 + dist.get_rank())

    def swap_data(self, draw):
        for parameter in self._some(draw):
            parameter.data = parameter.data.clone()

    def write_buffer(self, draw):
        self.model.module.norm.running_mean += 1 + dist.get_rank()


def assert_alike(mine, other, where, **tolerance):
    assert (mine is None) == (other is None), where
    if mine is not None:
        torch.testing.assert_close(
            mine.cpu(), other, msg=lambda text: f"{where}: {text}", **tolerance
        )


def assert_values_alike(ours, theirs, after, **tolerance):
    state = theirs.model.state_dict()
    for name, value in ours.model.state_dict().items():
        assert_alike(value, state[name], f"{name} {after}", **tolerance)


def assert_scripts_alike(ours, theirs, after):
    same = {"rtol": 0, "atol": 0}
    assert_values_alike(ours, theirs, after, **same)
    names = [name for name, _ in ours.model.named_parameters()]
    for name, mine, other in zip(names, ours.parameters, theirs.parameters, strict=True):
        assert_alike(mine.grad, other.grad, f"gradient of {name} {after}", **same)
    for mine, other in zip(ours.kept, theirs.kept, strict=True):
        assert_alike(mine, other, f"a gradient that was kept, {after}", **same)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def run(
    seed,
    without=(),
    in_buckets=False,
    make_optimizer=adamw,
    compare=assert_scripts_alike,
    hook=None,
    device=CPU,
    **arguments,
):
    """
    Args:
        in_buckets: ours has gradients in its buckets, as by default, and torch's never.
        make_optimizer: ours; torch's is `adamw`.
        hook: of both; its state is the group.
        device: ours.
    """
    views = {} if in_buckets else {"gradient_as_bucket_view": False}
    ours = Script(models.libddp_ddp(), make_optimizer, device=device, **views, **arguments)
    # With gradients in its buckets torch's goes on with wrong ones after `p.grad.data = ...`.
    theirs = Script(TorchDDP, adamw, process_group=models.gloo(), **arguments)
    if hook:
        ours.model.register_comm_hook(None, hook)
        theirs.model.register_comm_hook(models.gloo(), hook)
    random_scripts.run(seed, ours, theirs, compare, without)
