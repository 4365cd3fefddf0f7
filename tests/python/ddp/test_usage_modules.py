"""Several wrapped models in one process, and what a forward may return or leave out."""

import collections
import dataclasses

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import Heads, Mlp, gloo
from states import assert_same
from torch import nn
from usage import assert_agree, compare, data, gradients, ours, parameters, seed, theirs


def gan(wrap, separate_passes):
    """DCGAN's loop: the discriminator on real and fake data, then the generator through it."""
    generator, critic = wrap(Mlp(3), bucket_cap_mb=0.002), wrap(Mlp(2))
    for_generator = torch.optim.Adam(generator.parameters(), lr=0.02)
    for_critic = torch.optim.Adam(critic.parameters(), lr=0.02)
    for _ in range(4):
        for_critic.zero_grad()
        fake = generator(data(4))
        real_loss, fake_loss = critic(data(4)).mean(), -critic(fake.detach()).mean()
        if separate_passes:
            real_loss = critic(data(4)).mean()
            real_loss.backward()
            fake_loss = -critic(fake.detach()).mean()
            fake_loss.backward()
        else:
            (real_loss + fake_loss).backward()
        for_critic.step()
        for_generator.zero_grad()
        critic(fake).mean().backward()
        for_generator.step()
    return parameters(generator), parameters(critic)


def check_gan():
    for separate_passes in (False, True):
        trained = compare(gan, separate_passes)
        assert_agree(trained[0] + trained[1])


def two_in_one_loss(wrap, combine):
    one, other = wrap(Mlp(2)), wrap(Mlp(3), bucket_cap_mb=0.002)
    optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()], lr=0.02)
    for _ in range(4):
        optimizer.zero_grad()
        combine(one, other).pow(2).mean().backward()
        optimizer.step()
    return parameters(one), parameters(other)


def check_two_in_one_loss():
    side_by_side = compare(two_in_one_loss, lambda a, b: a(data(4)) + b(data(4)))
    chained = compare(two_in_one_loss, lambda a, b: b(a(data(4))))
    there_and_back = compare(two_in_one_loss, lambda a, b: a(b(a(data(4)))))
    for one, other in (side_by_side, chained, there_and_back):
        assert_agree(one + other)


class Outer(nn.Module):
    """Not wrapped itself; the wrapped one stands between two layers that each rank trains alone."""

    def __init__(self, inner):
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(16, 16), inner, nn.Linear(16, 16)

    def forward(self, value):
        return self.after(self.inner(torch.tanh(self.before(value))))


def nested(wrap):
    model = Outer(wrap(Mlp(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data(4)).pow(2).mean().backward()
        optimizer.step()
    return parameters(model.inner), parameters(model.before)


def check_one_inside_a_larger_module():
    inner, before = compare(nested)
    assert_agree(inner)
    with pytest.raises(AssertionError, match="the ranks differ"):
        assert_agree(before)


def new_group(wrap, members):
    if wrap is theirs:
        return dist.new_group(members, backend="gloo")
    from libddp.distributed import new_group

    return new_group(members)


def over_groups(wrap):
    """One model over both ranks, one over a second group, one over a group of each rank alone."""
    groups = [gloo() if wrap is theirs else None, new_group(wrap, [0, 1])]
    groups.append([new_group(wrap, [rank]) for rank in range(2)][dist.get_rank()])
    models = [wrap(Mlp(2), process_group=group) for group in groups]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        sum(model(data(4)).pow(2).mean() for model in models).backward()
        optimizer.step()
    return [parameters(model) for model in models]


def check_different_groups():
    whole, second, alone = compare(over_groups)
    assert_agree(whole + second)
    with pytest.raises(AssertionError, match="the ranks differ"):
        assert_agree(alone)


Named = collections.namedtuple("Named", "loss logits extra")


@dataclasses.dataclass
class Frozen:
    loss: torch.Tensor
    hidden: tuple = ()
    cache: object = None


class Ordered(collections.OrderedDict):
    """As model outputs of libraries: items that are attributes too."""

    def __getattr__(self, name):
        return self[name]


class Slots:
    """Nothing that a search of outputs would find."""

    __slots__ = ("loss", "rest")

    def __init__(self, loss, rest):
        self.loss, self.rest = loss, rest


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner, self.make = Mlp(3), make

    def forward(self, value):
        hidden = self.inner(value)
        return self.make(hidden.pow(2).mean(), hidden, value)


SHAPES = {
    "namedtuple": lambda loss, hidden, x: Named(loss, hidden, {"x": x, "none": None, "int": 3}),
    "dataclass": lambda loss, hidden, x: Frozen(loss, (hidden, [x, None]), {1: {2: [3.0]}}),
    "ordered": lambda loss, hidden, x: Ordered(loss=loss, hidden=[hidden], none=None),
    "slots": lambda loss, hidden, x: Slots(loss, [hidden, None]),
    "deep": lambda loss, hidden, x: Frozen(loss, ({"a": [({"b": (hidden, 1, "s")},)]},)),
    "detached": lambda loss, hidden, x: Named(
        loss, hidden.detach(), torch.ones(2, dtype=torch.int64)
    ),
    "views": lambda loss, hidden, x: Named(loss, hidden.t(), hidden[0]),
}


def returned(wrap, make, options):
    model = wrap(Returning(make), bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(data(4))
        assert type(output) is type(make(torch.ones(()), torch.ones(2, 2), None))
        output.loss.backward()
        optimizer.step()
    return parameters(model)


def check_outputs_of_any_structure():
    """Not compared with torch beyond the defaults: it searches fewer kinds of outputs there."""
    for make in SHAPES.values():
        trained = compare(returned, make, {})
        assert_agree(trained)
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            seed()
            assert_same(returned(ours, make, options), trained)


def only_a_part_of_the_outputs(wrap, options):
    """The loss needs one of several outputs, another one from step to step."""
    model = wrap(Heads(), **options)
    collected = []
    for step in range(3):
        model.zero_grad()
        outputs = [model(data(2, 4), head) for head in range(3)]
        (outputs[step] if options else sum(outputs)).pow(2).mean().backward()
        collected.append(gradients(model))
    return collected


def check_several_forwards_of_which_one_is_used():
    compare(only_a_part_of_the_outputs, {})


def check_some_forwards_without_a_loss():
    only_a_part_of_the_outputs(ours, {"find_unused_parameters": True})


class SkipsLayers(nn.Module):
    """A layer may be dropped, and on the shortest path there is no parameter at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, value, used):
        for index in used:
            value = torch.tanh(self.layers[index](value))
        return value


def dropped_layers(wrap):
    model = wrap(SkipsLayers(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    collected = []
    for step in range(4):
        optimizer.zero_grad()
        used = [[0, 1, 2], [2, 0], [1], [0]][(step + dist.get_rank()) % 4]
        model(data(4), used).pow(2).mean().backward()
        collected.append(gradients(model))
        optimizer.step()
    return collected, parameters(model)


def check_dropped_layers():
    compare(dropped_layers)


def check_a_path_without_parameters():
    """Not compared: torch waits for ever here. To us the rank counts as zero."""
    before = nn.Linear(16, 16)
    model = ours(SkipsLayers(), find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        used = [0, 2] if dist.get_rank() == step % 2 else []
        model(before(data(4)), used).pow(2).mean().backward()
        assert model.module.layers[1].weight.grad is None
        assert model.module.layers[0].weight.grad.abs().sum() > 0
        assert_agree([g for g in gradients(model) if g is not None])


def check_an_input_handed_through():
    """A leaf as the output: nothing but the leaf tells that a backward has begun."""
    model = ours(SkipsLayers(), find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        used = [1] if dist.get_rank() == step % 2 else []
        model(data(4).requires_grad_(), used).pow(2).mean().backward()
        assert model.module.layers[1].weight.grad.abs().sum() > 0
        assert_agree([g for g in gradients(model) if g is not None])


class CallsTwice(nn.Module):
    """The same layer several times in a forward, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight

    def forward(self, value):
        value = self.again(torch.tanh(self.again(torch.tanh(self.first(value)))))
        return self.tied(torch.tanh(self.again(value)))


def called_twice(wrap, options):
    model = wrap(CallsTwice(), bucket_cap_mb=0.0005, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        model(data(4)).pow(2).mean().backward()
        optimizer.step()
    return parameters(model)


def check_parameters_used_more_than_once():
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        assert_agree(compare(called_twice, options))


results, test_on_both_ranks = checks.suite(globals(), 2)
