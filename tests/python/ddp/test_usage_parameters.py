"""Parameters of any dtype, layout, size and number; states and data workers around the wrapper."""

import io

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import ConvNet, Mlp, gloo
from states import assert_same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from usage import assert_agree, compare, data, gradients, ours, parameters, seed, theirs, train


def error(kind, match):
    from libddp import errors

    return pytest.raises(getattr(errors, kind), match=match)


class Complex(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16, 16, dtype=dtype))
        self.inner = Mlp(2)

    def forward(self, value):
        return torch.view_as_real(self.inner(value).to(self.scale.dtype) @ self.scale)


def in_dtype(wrap, dtype):
    net = Complex(dtype) if dtype.is_complex else Mlp(3).to(dtype)
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    collected = []
    for _ in range(3):
        optimizer.zero_grad()
        value = data(4) if dtype.is_complex else data(4).to(dtype)
        # Large enough that no half of a float16 gradient is subnormal, which torch rounds earlier.
        (model(value).pow(2).sum() * 1024).backward()
        collected.append(gradients(model))
        optimizer.step()
    return collected, parameters(model)


DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def check_dtypes():
    for dtype in DTYPES:
        collected, trained = compare(in_dtype, dtype)
        assert_agree([*collected[-1], *trained])
        assert trained[0].dtype is dtype


class Layouts(nn.Module):
    """Weights transposed, sliced, channels last, of shape [], and two without elements."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(16, 8).t())
        self.sliced = nn.Parameter(torch.randn(8, 32)[:, ::2])
        self.conv = nn.Conv2d(8, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0))
        self.no_rows = nn.Parameter(torch.randn(0, 16))

    def forward(self, value):
        value = torch.tanh(value @ (self.transposed + self.sliced).t() * self.scalar)
        value = self.conv(value[:, :, None, None].expand(-1, -1, 4, 4))
        return value.flatten(1).sum(1) + self.nothing.sum() + self.no_rows.sum()


def of_layouts(wrap, options):
    model = wrap(Layouts(), bucket_cap_mb=0.0005, **options)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    assert [p.grad.shape for p in model.parameters()] == [p.shape for p in model.parameters()]
    return parameters(model)


def check_layouts_and_empty_parameters():
    for options in ({}, {"find_unused_parameters": True}):
        assert_agree(compare(of_layouts, options))
    model = ours(Layouts())
    model(data(4)).sum().backward()
    for name in ("transposed", "conv.weight"):  # optimizers run over both in one sweep
        parameter = model.module.get_parameter(name)
        assert parameter.grad.stride() == parameter.stride(), name


class Deep(nn.Module):
    """A thousand parameters, of a few elements each."""

    def __init__(self, number=1000):
        super().__init__()
        self.gains = nn.ParameterList(torch.rand(1 + i % 3) for i in range(number))

    def forward(self, value):
        for gain in self.gains:
            value = value * (1 + gain.mean() / 1000)
        return value


def deep(wrap, options):
    model = wrap(Deep(), **options)
    train(model, torch.optim.SGD(model.parameters(), lr=0.5, foreach=True))
    return parameters(model)


def check_a_thousand_parameters():
    assert_agree(compare(deep, {}))
    assert_agree(compare(deep, {"bucket_cap_mb": 0.001}))


KEEP = {
    "themselves": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "views": lambda grad: grad.view(-1),
}


def kept(wrap, keep, options):
    """Gradients of some steps, over zero_grad(set_to_none=True)."""
    model = wrap(Mlp(3), **options)
    found = []
    for step in range(5):
        for passes in range(1 + step % 2):
            model(data(4) * (step + passes + 1)).pow(2).mean().backward()
        found.append([keep(p.grad) for p in model.parameters()] if step in (1, 3) else [])
        model.zero_grad()
    return found


def check_kept_gradients():
    for keep in KEEP.values():
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            compare(kept, keep, options)


def turned(wrap):
    """`.grad` is another view of the same memory when the next pass adds to it."""
    model = wrap(nn.Linear(4, 4))
    for step in range(3):
        model(torch.full((2, 4), 1.0 + step + dist.get_rank())).pow(2).sum().backward()
        model.module.weight.grad = model.module.weight.grad.t()
    return gradients(model)


def check_a_gradient_that_is_turned():
    compare(turned)


def loaded(wrap, assign):
    """A checkpoint comes after wrapping, when optimizer and buckets are there already."""
    model = wrap(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = (2, 3, 5, 5)
    model(torch.randn(images)).pow(2).mean().backward()
    optimizer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(images)).pow(2).mean().backward()
    optimizer.step()
    model.load_state_dict(saved)
    assert_same(dict(model.state_dict()), saved)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(images)).pow(2).mean().backward()
        optimizer.step()
    return dict(model.state_dict())


def check_load_state_dict_after_wrapping():
    compare(loaded, False)


def check_assigned_states_are_refused():
    """load_state_dict(assign=True) replaces the parameters; torch then averages nothing."""
    model = ours(Mlp(2))
    model.load_state_dict(model.state_dict(), assign=True)
    model.requires_grad_()
    with error("StateError", r"4 of 4.*'layers.0.weight' \(all ranks\).*replaced after wrapping"):
        model(data(2)).sum().backward()


def check_dtype_changed_after_wrapping():
    for change in (nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        model = change(ours(Mlp(2)))
        dtype = next(model.parameters()).dtype
        model(data(2).to(dtype)).sum().backward()
        assert_agree(gradients(model))
        again = ours(model.module)
        again.zero_grad()
        again(data(2).to(dtype)).sum().backward()
        assert_agree(gradients(again))


def resumed(wrap_first, wrap_then):
    """Half of the steps with one wrapper, the rest with the other, by way of saved states."""
    seed()
    model = wrap_first(ConvNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    images(model, optimizer)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f := io.BytesIO()
    )
    f.seek(0)
    saved = torch.load(f)
    assert all(name.startswith("module.") for name in saved["model"])
    model = wrap_then(ConvNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    assert str(model.load_state_dict(saved["model"])) == "<All keys matched successfully>"
    optimizer.load_state_dict(saved["optimizer"])
    images(model, optimizer)
    return dict(model.state_dict())


def images(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5)).pow(2).mean().backward()
        optimizer.step()


def check_states_go_to_torch_and_back():
    expected = resumed(theirs, theirs)
    for pair in ((ours, theirs), (theirs, ours), (ours, ours)):
        assert_same(resumed(*pair), expected)


def check_a_saved_wrapped_model():
    model = ours(Mlp(2))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.save(model, f := io.BytesIO())
    f.seek(0)
    other = torch.load(f, weights_only=False)
    assert_same(parameters(other), parameters(model))
    other.zero_grad()
    other(data(2)).sum().backward()
    assert_agree(gradients(other))
    with error("StateError", "default process group.*Hint: copy or save model.module"):
        torch.save(ours(Mlp(2), process_group=own_group()), io.BytesIO())


def own_group():
    from libddp.distributed import new_group

    return new_group([0, 1])


def from_workers(wrap):
    """Processes that are forked while the group, its threads and its shared memory exist."""
    gloo()
    dataset = TensorDataset(torch.randn(24, 16, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(dataset, shuffle=True, seed=4)
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=1)
    model = wrap(Mlp(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    return parameters(model)


def check_data_workers():
    assert_agree(compare(from_workers))
    dist.barrier()  # the workers that have ended took nothing of the group with them


results, test_on_both_ranks = checks.suite(globals(), 2)
