"""Gradients in memory of the script's own: averages come there, and tensors stay what they are."""

import checks
import torch
from ddp_models import Mlp
from libddp.nn.parallel import DistributedDataParallel
from torch import nn
from usage import compare, data, parameters, seed

SMALL = {"bucket_cap_mb": 0.001}


def lay_flat(net):
    """Gradients become pieces of one tensor, which is returned."""
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    begin = 0
    for p in net.parameters():
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    return flat


def pieces_of_one_tensor(wrap, is_before, options):
    seed()
    net = Mlp(3)
    flat = lay_flat(net) if is_before else None
    model = wrap(net, **options)
    if not is_before:
        flat = lay_flat(model)
    collected = []
    for turn in range(4):
        flat.zero_()
        if turn % 2:
            with model.no_sync():
                model(data(4)).pow(2).mean().backward()
            collected.append(flat.clone())
        model(data(4)).pow(2).mean().backward()
        collected.append(flat.clone())
        assert all(p.grad.data_ptr() != p.data_ptr() for p in model.parameters())
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == {
            flat.untyped_storage().data_ptr()
        }
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    assert flat.abs().sum() > 0
    return collected + parameters(model)


def check_pieces_of_one_tensor():
    for is_before in (False, True):
        for options in ({}, SMALL, {"find_unused_parameters": True}, {"static_graph": True}):
            compare(pieces_of_one_tensor, is_before, options)


def given_between_forward_and_backward(wrap):
    seed()
    model = wrap(Mlp(2), **SMALL)
    collected = []
    for _ in range(3):
        loss = model(data(4)).pow(2).mean()
        flat = lay_flat(model)
        loss.backward()
        collected.append(flat)
    return collected


def check_given_between_forward_and_backward():
    compare(given_between_forward_and_backward)


def seen_by_hooks(wrap):
    seed()
    model = wrap(Mlp(2), **SMALL)
    seen = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.update({p: p.grad}))
    collected = []
    for _ in range(3):
        model.zero_grad()
        model(data(4)).pow(2).mean().backward()
        assert all(seen[p] is p.grad for p in model.parameters())
        collected += [seen[p].clone() for p in model.parameters()]
    return collected


def check_seen_by_hooks():
    # They see a gradient before it is averaged.
    compare(seen_by_hooks)


class Backwards(nn.Module):
    """Its layers run from the last to the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def one_list_for_all_steps(wrap, set_to_zero):
    seed()
    model = wrap(Backwards(), **SMALL)
    places = []
    listed = None
    collected = []
    for _ in range(4):
        set_to_zero(model)
        model(data(4)).pow(2).mean().backward()
        if listed is None:
            listed = [p.grad for p in model.parameters()]
        assert all(p.grad is g for p, g in zip(model.parameters(), listed, strict=True))
        places.append([g.data_ptr() for g in listed])
        collected += [g.clone() for g in listed]
        with torch.no_grad():
            for p, g in zip(model.parameters(), listed, strict=True):
                p -= 0.1 * g
    assert places[1] == places[3]
    if isinstance(model, DistributedDataParallel):
        assert places[0] != places[1]  # the second forward puts gradients into other buckets
    return collected


def check_one_list_for_all_steps():
    compare(one_list_for_all_steps, lambda model: model.zero_grad(set_to_none=False))
    compare(one_list_for_all_steps, lambda model: None)


def other_memory(wrap, move):
    seed()
    model = wrap(Mlp(2))
    collected = []
    for turn in range(4):
        model.zero_grad(set_to_none=False)
        model(data(4)).pow(2).mean().backward()
        if turn == 0:
            move(model)
            places = [p.grad.data_ptr() for p in model.parameters()]
        assert [p.grad.data_ptr() for p in model.parameters()] == places
        collected += [p.grad.clone() for p in model.parameters()]
    return collected


def set_data(model):
    for p in model.parameters():
        p.grad.data = p.grad.clone()


def check_other_memory():
    compare(other_memory, lambda model: model.share_memory())
    compare(other_memory, set_data)


results, test_on_two_ranks = checks.suite(globals(), 2)
