"""What scripts do to a model and its gradients, in any order: after each, what torch's DDP has.

At two ranks, bit for bit (test_parity.py says why).
"""

import random

import checks
import ddp_models as models
import random_scripts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP


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

    def __init__(self, ddp_class, make_optimizer, all_heads=True, **arguments):
        torch.manual_seed(3)
        model = ddp_class(Branches(), bucket_cap_mb=0.0001, **arguments)
        super().__init__(model, make_optimizer(model))
        self._all_heads = all_heads

    def _loss(self, draw):
        """On data of this rank, with a choice of heads that may be this rank's."""
        mine = random.Random(draw.random() + (dist.get_rank() if draw.random() < 0.5 else 0))
        heads = [head for head in range(3) if self._all_heads or mine.random() < 0.6]
        data = torch.Generator().manual_seed(draw.randrange(1000) + 1000 * dist.get_rank())
        return self.model(torch.randn(3, 2, 4, 4, generator=data), heads).square().mean()

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
        torch.testing.assert_close(mine, other, msg=lambda text: f"{where}: {text}", **tolerance)


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
    **arguments,
):
    """
    Args:
        make_optimizer: ours; torch's is `adamw`.
        hook: of both; its state is the group.
    """
    ours = Script(
        models.libddp_ddp(), make_optimizer, gradient_as_bucket_view=in_buckets, **arguments
    )
    # With gradients in its buckets torch's goes on with wrong ones after `p.grad.data = ...`.
    theirs = Script(TorchDDP, adamw, process_group=models.gloo(), **arguments)
    if hook:
        ours.model.register_comm_hook(None, hook)
        theirs.model.register_comm_hook(models.gloo(), hook)
    random_scripts.run(seed, ours, theirs, compare, without)


SEEDS = range(3)
#: Passes whose parameters count as used for torch in the next one, though they are cleared.
ALONE = ["backward_without_sync", "backward_of_a_part", "gradients_by_hand"]


def check_gradients_of_their_own():
    for seed in SEEDS:
        run(seed)


def check_gradients_in_buckets():
    for seed in SEEDS:
        run(seed, without=["keep"], in_buckets=True)


def check_hooks():
    for seed in SEEDS:
        for hook in (hooks.allreduce_hook, hooks.fp16_compress_hook):
            run(seed, hook=hook)


def check_hooks_in_buckets():
    for seed in SEEDS:
        run(seed, without=["keep"], in_buckets=True, hook=hooks.bf16_compress_hook)


#: What torch's reducer has no place for when it has seen its graph, or before.
NOT_STATIC = ["backward_of_a_part", "gradients_by_hand", "backward_of_the_second_forward"]
NOT_STATIC += ["backward_without_sync", "accumulate"]


def check_static_graph():
    for seed in SEEDS:
        run(seed, NOT_STATIC, static_graph=True)
        run(seed, ["keep", *NOT_STATIC], in_buckets=True, static_graph=True)


def check_unused_parameters():
    for seed in SEEDS:
        run(seed, without=ALONE, all_heads=False, find_unused_parameters=True)


def check_unused_parameters_in_buckets():
    # What is given to a parameter that nobody uses is averaged, with torch's buckets too.
    for seed in SEEDS:
        run(
            seed,
            without=["keep", "give", *ALONE],
            in_buckets=True,
            all_heads=False,
            find_unused_parameters=True,
        )


#: A sharing optimizer refuses parameters with other memory and steps with what is not averaged, and
#: counts the values of an element's owner, where others may have other ones.
NOT_SHARED = ["keep", "swap_data", "give", "write_buffer", "backward_without_sync"]
NOT_SHARED += ["backward_of_a_part"]


def check_shared_work():
    def make_optimizer(model):
        return libddp_optim().AdamW(model.parameters(), lr=0.05, shard_over=model)

    for seed in SEEDS:
        run(seed, NOT_SHARED, in_buckets=True, make_optimizer=make_optimizer)


def check_shared_gradients():
    def make_optimizer(model):
        return libddp_optim().AdamW(
            model.parameters(), lr=0.05, shard_over=model, shard_gradients=True
        )

    def compare(ours, theirs, after):
        # What a second pass adds to an average is added in another order.
        assert_values_alike(ours, theirs, after, rtol=1e-3, atol=1e-4)

    for seed in SEEDS:
        run(seed, NOT_SHARED, True, make_optimizer, compare)


def libddp_optim():
    from libddp import optim

    return optim


results, test_on_two_ranks = checks.suite(globals(), 2)
