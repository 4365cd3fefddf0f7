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


LAYOUTS = {
    "transposed": lambda g: g.mT.contiguous().mT,
    "expanded": lambda g: g.flatten()[0].expand(g.shape),
    "expanded-rows": lambda g: g[:1].expand(g.shape),
    "sliced": lambda g: torch.stack([g, g + 1], -1)[..., 0],
    "flipped": lambda g: g.flip(0).contiguous().flip(0),
    "channels-last": lambda g: (
        g.contiguous(memory_format=torch.channels_last) if g.dim() == 4 else g
    ),
    "contiguous": lambda g: g.contiguous(),
}


def odd_parameters():
    """Transposed, channels last, with gaps, of one element, plain."""
    torch.manual_seed(1)
    values = [
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, 8)[:, ::2],
        torch.randn(1, 1),
        torch.randn(3, 7),
    ]
    return [nn.Parameter(value) for value in values]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}])
def test_gradients_of_any_layout(layout, options):
    """Those that a script assigns. The same bits as torch's fused AdamW, given dense gradients."""
    ours, fused, plain = odd_parameters(), odd_parameters(), odd_parameters()
    fused = [nn.Parameter(p.detach().contiguous()) for p in fused]
    optimizers = [
        AdamW(ours, lr=0.1, **options),
        torch.optim.AdamW(fused, lr=0.1, fused=True, **options),
        torch.optim.AdamW(plain, lr=0.1, **options),
    ]
    for step in range(3):
        torch.manual_seed(step)
        for mine, one, other in zip(ours, fused, plain, strict=True):
            gradient = LAYOUTS[layout](torch.randn(mine.shape))
            mine.grad = other.grad = gradient
            one.grad = gradient.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    for mine, one, other in zip(ours, fused, plain, strict=True):
        assert torch.equal(mine, one)
        torch.testing.assert_close(mine, other)


def test_a_state_of_another_layout():
    """Saved by a model in another memory format."""

    def conv(memory_format):
        torch.manual_seed(0)
        return nn.Conv2d(4, 4, 2).to(memory_format=memory_format)

    def train_one(net, optimizer, steps):
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            net(torch.randn(2, 4, 6, 6)).pow(2).mean().backward()
            optimizer.step()

    source = conv(torch.contiguous_format)
    saved = AdamW(source.parameters(), lr=0.1)
    train_one(source, saved, 2)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net = conv(memory_format)
        net.load_state_dict(source.state_dict())
        optimizer = AdamW(net.parameters(), lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        for parameter in net.parameters():
            torch.manual_seed(3)
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *results))


def test_a_scaled_gradient_of_another_layout_is_unscaled():
    ours, theirs = (nn.Parameter(torch.arange(6.0).reshape(2, 3)) for _ in range(2))
    for parameter, cls, extra in ((ours, AdamW, {}), (theirs, torch.optim.AdamW, {"fused": True})):
        optimizer = cls([parameter], **extra)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(parameter.sum()).backward()
        gradient = torch.arange(6.0).reshape(2, 3) * 8
        parameter.grad = gradient.t().contiguous().t() if parameter is ours else gradient
        scaler.step(optimizer)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.grad, theirs.grad)


def test_steps_that_are_counted_in_another_dtype():
    """torch's AdamW counts in float64 where that is the default dtype, older ones in numbers."""
    ours, theirs = model(), model()
    mine, torchs = AdamW(groups(ours)), torch.optim.AdamW(groups(theirs), fused=True)
    train(theirs, torchs, 3)
    ours.load_state_dict(theirs.state_dict())
    state = copy.deepcopy(torchs.state_dict())
    for index, entries in state["state"].items():
        entries["step"] = entries["step"].double() if index % 2 else entries["step"].item()
    mine.load_state_dict(state)
    train(ours, mine, 2, first=3)
    train(theirs, torchs, 2, first=3)
    assert equal(ours, theirs)
