"""What the forward of a sharded module may return: a backward pass from any part of it counts."""

import dataclasses
from typing import NamedTuple

import checks
import fsdp_models as models
import torch
from torch import nn


@dataclasses.dataclass
class Plain:
    loss: torch.Tensor
    rest: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    loss: torch.Tensor
    rest: object = None


@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    loss: torch.Tensor
    rest: object = None


class Named(NamedTuple):
    loss: torch.Tensor
    rest: object = None


class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.kind = nn.Linear(4, 3), kind

    def forward(self, x):
        hidden = self.inner(x)
        return self.kind(hidden.pow(2).mean(), [{"hidden": hidden}])


def check_outputs_of_any_class():
    x = torch.ones(2, 4)
    for kind in (Plain, Slots, Frozen, Named):
        for part in (lambda out: out.loss, lambda out: out.rest[0]["hidden"].sum()):
            plain = Returning(kind)
            part(plain(x)).backward()
            for face in models.faces():
                model = face(Returning(kind))
                output = model(x)
                assert type(output) is kind
                part(output).backward()
                for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(own_rows(own.grad), rows(wanted.grad))


class WithBias(nn.Module):
    """Its forward returns parameters, as SigLIP's gives the loss its bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(4, 1)
        self.bias = nn.Parameter(torch.full((1,), 2.0))
        self.table = nn.Parameter(torch.arange(16.0).view(4, 4))

    def forward(self, x):
        return Plain(self.inner(x), {"bias": self.bias, "more": [self.table]})


def check_parameters_that_a_forward_returns():
    x, plain = torch.ones(3, 4), WithBias()

    def loss_of(output):
        bias, (table,) = output.rest["bias"], output.rest["more"]
        return (output.loss * bias).sum() + table.pow(2).sum()

    wanted = loss_of(plain(x))
    wanted.backward()
    for face in models.faces():
        model = face(WithBias())
        loss = loss_of(model(x))
        assert torch.equal(loss, wanted)
        loss.backward()
        for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
            if own_rows(own).numel():
                assert torch.equal(own_rows(own.grad), rows(whole.grad))
        with torch.no_grad():
            assert torch.equal(model(x).rest["more"][0], plain.table)


def check_transforms_of_functions():
    """As if the weights were constants, also those that are made for it (low precision)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    x, shard = torch.ones(2, 4), models.libddp_fsdp().fully_shard
    transforms = (
        lambda net: torch.func.jvp(net, (x,), (x,))[1],
        lambda net: torch.func.grad(lambda u: net(u).float().sum())(x),
        lambda net: torch.vmap(net)(x),
        lambda net: torch.func.jacrev(net)(x[0]),
    )
    for transform in transforms:
        for dtype in (None, torch.bfloat16):
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            sharded = [shard(layer(), mp_policy=policy), shard(layer("meta"), mp_policy=policy)]
            sharded[1].to_empty(device="cpu")
            for parameter in sharded[1].parameters():
                nn.init.constant_(parameter, 0.1)
            wanted = transform(layer())
            for model in sharded:
                found = transform(model).to(wanted.dtype)
                torch.testing.assert_close(found, wanted, rtol=0 if dtype is None else 1e-2, atol=0)


def layer(device="cpu"):
    made = nn.Linear(4, 4, device=device)
    for parameter in made.parameters():
        nn.init.constant_(parameter, 0.1)
    return made


def own_rows(grad):
    return grad.to_local() if hasattr(grad, "to_local") else grad


def rows(whole):
    """This rank's."""
    return whole.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]


results, test_on_two_ranks = checks.suite(globals(), 2)
