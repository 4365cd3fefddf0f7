"""libddp.optim.AdamW against torch's fused AdamW, on one process."""

import copy

import pytest
import torch
from torch import nn

from libddp.optim import AdamW


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def groups(net, decay=0.1):
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(5, 8)).pow(2).mean().backward()
        optimizer.step()


def equal(left, right):
    return all(map(torch.equal, left.parameters(), right.parameters()))


@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(0.01)}, {"betas": (0.8, 0.9)}],
)
def test_equals_torchs_fused(options):
    ours, theirs = model(), model()
    train(ours, AdamW(groups(ours), **options), 5)
    train(theirs, torch.optim.AdamW(groups(theirs), fused=True, **options), 5)
    assert equal(ours, theirs)


def test_states_pass_between_the_two():
    ours, theirs = model(), model()
    mine, torchs = AdamW(groups(ours)), torch.optim.AdamW(groups(theirs), fused=True)
    train(ours, mine, 3)
    train(theirs, torchs, 3)
    state, torch_state = copy.deepcopy(mine.state_dict()), copy.deepcopy(torchs.state_dict())
    mine.load_state_dict(torch_state)
    state["param_groups"] = torch_state["param_groups"]
    torchs.load_state_dict(state)
    train(ours, mine, 2, first=3)
    train(theirs, torchs, 2, first=3)
    assert equal(ours, theirs)


def test_gradient_scaler():
    ours, theirs = model(), model()
    for net, cls, extra in ((ours, AdamW, {}), (theirs, torch.optim.AdamW, {"fused": True})):
        optimizer = cls(net.parameters(), **extra)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = net(torch.randn(5, 8)).pow(2).mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert equal(ours, theirs)


def test_closure_and_parameters_without_gradient():
    net = model()
    optimizer = AdamW(net.parameters())

    def closure():
        optimizer.zero_grad()
        loss = net[0](torch.ones(1, 8)).sum()
        loss.backward()
        return loss

    before = net[2].weight.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(closure().item(), abs=1)
    assert torch.equal(net[2].weight, before)


def test_mistakes():
    with pytest.raises(ValueError, match="neither capturable nor differentiable"):
        AdamW([torch.ones(1, requires_grad=True)], capturable=True)
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="with a sparse gradient"):
        AdamW(table.parameters()).step()
