"""Parameters that several wrappers train: one encoder under two heads, a part and the whole, and
a module that is wrapped again while the old wrapper is used. Against torch's DDP on Gloo."""

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import gloo
from states import assert_same
from torch import nn
from usage import assert_agree, compare, data, ours, seed


class Head(nn.Module):
    """Something of its own on top of what others train too."""

    def __init__(self, encoder, width=4):
        super().__init__()
        self.encoder = encoder
        self.own = nn.Linear(16, width)

    def forward(self, value):
        return self.own(torch.tanh(self.encoder(value)))


def encoder():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def loss(model):
    return model(data(4)).pow(2).sum()


class Pair:
    """Actor and critic over one encoder; small buckets, so that several are sent in a pass."""

    def __init__(self, wrap, **options):
        options = {"bucket_cap_mb": 0.001, **options}
        inner = encoder()
        self.actor = wrap(Head(inner), **options)
        self.critic = wrap(Head(inner, 1), **options)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        self.seen = []

    def parameters(self):
        return list(dict.fromkeys([*self.actor.parameters(), *self.critic.parameters()]))

    def note(self):
        """What `.grad` holds, also of what has none yet."""
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])

    def step(self):
        self.note()
        self.optimizer.step()
        self.seen.append([p.detach().clone() for p in self.parameters()])


def one_backward(pair):
    (loss(pair.actor) + loss(pair.critic)).backward()


def one_backward_other_way_round(pair):
    late = loss(pair.critic)
    (late + loss(pair.actor)).backward()


def one_after_the_other(pair):
    loss(pair.actor).backward()
    pair.note()
    loss(pair.critic).backward()


def only_the_first(pair):
    loss(pair.actor).backward()


def only_the_second(pair):
    loss(pair.critic).backward()


def with_accumulation(pair):
    with pair.actor.no_sync():
        loss(pair.actor).backward()
    loss(pair.critic).backward()
    pair.note()
    loss(pair.actor).backward()


def one_idle_in_a_common_backward(pair):
    with pair.actor.no_sync():
        first = loss(pair.actor)
    (first + loss(pair.critic)).backward()
    pair.actor.module.own.zero_grad()  # not averaged, in torch neither


def both_idle_then_both(pair):
    with pair.actor.no_sync(), pair.critic.no_sync():
        (loss(pair.actor) + loss(pair.critic)).backward()
    (loss(pair.actor) + loss(pair.critic)).backward()


ORDERS = (
    one_backward,
    one_backward_other_way_round,
    one_after_the_other,
    only_the_first,
    only_the_second,
    with_accumulation,
    one_idle_in_a_common_backward,
    both_idle_then_both,
)


def trained(wrap, orders, to_none, options):
    pair = Pair(wrap, **options)
    for order in orders:
        if to_none is not None:
            pair.optimizer.zero_grad(set_to_none=to_none)
        order(pair)
        pair.step()
    assert_agree([p.grad for p in pair.parameters() if p.grad is not None])
    assert_agree(pair.parameters())
    return pair.seen


def check_each_order_of_use():
    for order in ORDERS:
        for to_none in (True, False, None):
            compare(trained, [order] * 3, to_none, {})


def check_one_order_after_another():
    compare(trained, ORDERS, True, {})
    compare(trained, ORDERS[::-1], False, {})


def check_unused_parameters():
    for to_none in (True, False):
        compare(trained, ORDERS, to_none, {"find_unused_parameters": True})


def check_a_static_graph():
    # Torch's static graph lets a reducer count what another one's pass brings.
    for order in (one_backward, one_backward_other_way_round):
        compare(trained, [order] * 3, True, {"static_graph": True})
    seed()
    separate = trained(ours, [one_after_the_other] * 3, True, {"static_graph": True})
    seed()
    assert_same(separate, trained(ours, [one_after_the_other] * 3, True, {}))


def check_gradients_as_views():
    # Torch refuses a backward over both then: only its own bucket may be `.grad`.
    options = {"gradient_as_bucket_view": True}
    for order in (one_after_the_other, only_the_first, with_accumulation):
        for to_none in (True, False):
            compare(trained, [order] * 3, to_none, options)
    seed()
    views = trained(ours, ORDERS, True, options)
    assert_same(views, compare(trained, ORDERS, True, {}))


def forwards_first(pair):
    first, second = loss(pair.actor), loss(pair.critic)
    first.backward()
    pair.note()
    second.backward()


def forward_of_both_but_one_backward(pair):
    first = loss(pair.actor)
    loss(pair.critic)
    first.backward()


def check_forwards_before_the_backwards():
    """Torch raises: it takes a gradient of another model's pass for one of its own."""
    results = []
    for orders in ([forwards_first] * 3, [one_after_the_other] * 3):
        seed()
        results.append(trained(ours, orders, True, {}))
    assert_same(*results)
    seed()
    trained(ours, [forward_of_both_but_one_backward, forwards_first, one_backward], True, {})


class Opaque:
    """An output that nobody can look into."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Hidden(Head):
    def forward(self, value):
        return Opaque(super().forward(value))


def hidden_outputs(wrap, hides_first):
    inner = encoder()
    kinds = (Hidden, Head) if hides_first else (Head, Hidden)
    models = [wrap(kind(inner)) for kind in kinds]
    seen = []
    for _ in range(3):
        for model in models:
            model.zero_grad()
        total = 0
        for model in models:
            output = model(data(4))
            total = total + getattr(output, "value", output).pow(2).sum()
        total.backward()
        seen.append([p.grad.clone() for model in models for p in model.parameters()])
    assert_agree(seen[-1])
    return seen


def check_outputs_that_nobody_knows():
    for hides_first in (True, False):
        compare(hidden_outputs, hides_first)


def whole_and_part(wrap, order):
    model = Head(encoder())
    whole, part = wrap(model), wrap(model.encoder, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for name in order:
        optimizer.zero_grad()
        if "w" in name:
            loss(whole).backward()
        if "p" in name:
            loss(part).backward()
        if "b" in name:
            (loss(whole) + loss(part)).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    assert_agree([p.grad for p in model.parameters() if p.grad is not None])
    return seen, [p.detach().clone() for p in model.parameters()]


def check_a_model_and_a_part_of_it():
    for order in (["w", "p", "w", "p"], ["p", "p", "w", "wp"], ["b", "pw", "b", "p", "b"]):
        compare(whole_and_part, order)


def wrapped_inside(wrap):
    """The encoder is wrapped by itself, and its wrapper is a part of what the other one wraps."""
    part = wrap(encoder())
    model = wrap(Head(part))
    seen = []
    for _ in range(3):
        model.zero_grad()
        loss(model).backward()
        loss(part).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
    assert_agree(seen[-1])
    return seen


def check_a_wrapper_inside_another():
    compare(wrapped_inside)


def wrapped_again(wrap, order, keep_gradients):
    module = Head(encoder())
    wrappers = {"old": wrap(module, bucket_cap_mb=0.001)}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    seen = []
    for name in order:
        if name == "new" and name not in wrappers:
            wrappers[name] = wrap(module)
        if name == "drop":
            del wrappers["old"]
            continue
        if not keep_gradients:
            optimizer.zero_grad()
        loss(wrappers[name]).backward()
        seen.append([p.grad.clone() for p in module.parameters()])
        optimizer.step()
    assert_agree([p.grad for p in module.parameters()])
    return seen, [p.detach().clone() for p in module.parameters()]


def check_a_module_wrapped_again():
    for order in (
        ["old", "new", "old", "new", "old"],
        ["new", "old", "old", "new"],
        ["old", "old", "new", "drop", "new", "new"],
    ):
        for keep_gradients in (False, True):
            compare(wrapped_again, order, keep_gradients)


def check_what_one_wrapper_alone_trains_stays_in_its_bucket():
    module = Head(encoder())
    old = ours(module)
    loss(old).backward()
    place = {n: p.grad.data_ptr() for n, p in module.named_parameters()}
    part = ours(module.encoder)
    loss(old).backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad.data_ptr() == place[name]) == name.startswith("own"), name
    del part
    module.zero_grad()
    loss(old).backward()
    loss(old).backward()
    again = {n: p.grad.data_ptr() for n, p in module.named_parameters()}
    loss(old).backward()
    assert again == {n: p.grad.data_ptr() for n, p in module.named_parameters()}


class Lookup(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.own = table, nn.Linear(4, 4)

    def forward(self, rows):
        return self.own(self.table(rows))


def check_sparse_gradients():
    """Torch divides the common gradient twice: its result is the half of the average."""
    sums = []
    for sparse in (True, False):
        seed()
        table = nn.Embedding(8, 4, sparse=sparse)
        first, second = ours(Lookup(table)), ours(Lookup(table))
        for _ in range(2):
            rows = torch.randint(8, (3,))
            (first(rows).pow(2).sum() + second(rows).pow(2).sum()).backward()
            first(rows).pow(2).sum().backward()
        grad = table.weight.grad
        sums.append(grad.to_dense() if sparse else grad.clone())
        assert_agree(sums[-1:])
    torch.testing.assert_close(*sums)


def check_a_hook_and_none():
    """The last one to end a pass has the last word, as in torch."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def hooked(wrap):
        pair = Pair(wrap)
        group = gloo() if wrap is not ours else None
        pair.critic.register_comm_hook(group, bf16_compress_hook)
        for order in (one_after_the_other, only_the_second, only_the_first):
            pair.optimizer.zero_grad()
            order(pair)
            pair.step()
        assert_agree(pair.parameters())
        return pair.seen

    compare(hooked)


def check_delayed_gradients():
    """Each of the two averages what `.grad` holds when its own trigger has fired."""
    seed()
    inner = encoder()
    models = []
    for _ in range(2):
        head = Head(inner)
        delayed = [("encoder.0.weight", inner[0].weight), ("encoder.0.bias", inner[0].bias)]
        options = {"delay_all_reduce_named_params": delayed}
        models.append(ours(head, param_to_hook_all_reduce=head.own.weight, **options))
    for _ in range(2):
        inner.zero_grad()
        values = [data(4), data(4)]
        expected = []
        for model, value in zip(models, values, strict=True):
            copy = model.module
            grads = torch.autograd.grad(copy(value).sum(), list(inner.parameters()))
            expected.append(torch.cat([g.flatten() for g in grads]))
        total = sum(expected)
        dist.all_reduce(total)
        for model, value in zip(models, values, strict=True):
            model(value).sum().backward()
        found = torch.cat([p.grad.flatten() for p in inner.parameters()])
        torch.testing.assert_close(found, total / dist.get_world_size())
        assert_agree([found])


def check_what_needs_its_parameters_for_itself():
    """Mixed precision and ZeRO-1: the next forward of either is refused, by name."""
    from libddp.errors import StateError
    from torch.distributed.fsdp import MixedPrecision

    from libddp.optim import AdamW

    seed()
    module = Head(encoder())
    low = ours(module, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    low(data(2)).float().sum().backward()
    part = ours(module.encoder)
    for model in (low, part):
        with pytest.raises(StateError, match=r"parameter '.*0\.weight' is trained by another"):
            model(data(2))
    del low, model
    loss(part).backward()

    whole = ours(module)
    with pytest.raises(StateError, match=r"'encoder\.0\.weight' is trained by another .* Hint"):
        AdamW(whole.parameters(), shard_over=whole)
    del whole
    alone = ours(encoder())
    optimizer = AdamW(alone.parameters(), shard_over=alone)
    loss(alone).backward()
    again = ours(alone.module)
    for model in (alone, again):
        with pytest.raises(StateError, match=r"'0\.weight' is trained by another"):
            model(data(2))
    with pytest.raises(StateError, match=r"'0\.weight' is trained by another"), alone.no_sync():
        alone(data(2))
    del again, model
    loss(alone).backward()
    optimizer.step()


results, test_on_all_ranks = checks.suite(globals(), 2)
