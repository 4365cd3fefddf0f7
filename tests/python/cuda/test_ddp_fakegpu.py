"""DistributedDataParallel of a model on the fake device: the numbers of the CPU, and no races."""

import fakegpu
import pytest
import ranks
import torch
from device_models import Net, batch, made, of_cpu, place
from libddp.distributed import get_rank, init_process_group
from libddp.errors import ArgumentError
from libddp.nn.parallel import DistributedDataParallel
from torch import nn

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))

STEPS = 4


def plain(kind, options):
    init_process_group("gloo")
    device = place(kind)
    model = made(device, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        unused = options.get("find_unused_parameters") and step != 2
        if unused and get_rank() == 1:
            model(batch(step), with_middle=False).pow(2).sum().backward()
        else:
            model(batch(step)).pow(2).sum().backward()
        optimizer.step()
    if kind != "cpu":
        assert model.device_ids == [device.index]
        assert model.output_device == device.index
        assert all(b.done_ns is None for p in model.timings() for b in p.buckets)
        assert fakegpu.races() == []
    return of_cpu(model)


def accumulating(kind, options):
    init_process_group("gloo")
    device = place(kind)
    model = made(device, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(2 * step)).pow(2).sum().backward()
        model(batch(2 * step + 1)).pow(2).sum().backward()
        optimizer.step()
    if kind != "cpu":
        assert fakegpu.races() == []
    return of_cpu(model)


def compressed(kind, options):
    init_process_group("gloo")
    device = place(kind)
    model = made(device, **options)
    model.compress_gradients(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).pow(2).sum().backward()
        optimizer.step()
    if kind != "cpu":
        assert fakegpu.races() == []
    return of_cpu(model)


KEEP = {
    "gradient": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "view": lambda grad: grad.view(-1),
}


def keeping(kind, options):
    """Gradients that a script keeps over zero_grad(set_to_none=True)."""
    options = dict(options)
    keep = KEEP[options.pop("keep")]
    init_process_group("gloo")
    device = place(kind)
    model = made(device, **options)
    kept, wanted = [], []
    for step in range(STEPS):
        model.zero_grad()
        unused = options.get("find_unused_parameters") and step == 2
        model(batch(step), with_middle=not unused).pow(2).sum().backward()
        with_gradient = [p.grad for p in model.parameters() if p.grad is not None]
        if step < 2:
            kept += [keep(grad) for grad in with_gradient]
            wanted += [keep(grad).cpu().clone() for grad in with_gradient]
    found = [grad.cpu() for grad in kept]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    if kind != "cpu":
        assert fakegpu.races() == []
    return found, of_cpu(model)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("keep", KEEP)
def test_kept_gradients_keep_their_values(options, keep):
    options = options | {"keep": keep}
    on_cpu, on_device = (ranks.run(keeping, 2, kind, options) for kind in ("cpu", "fakegpu"))
    torch.testing.assert_close(on_device, on_cpu, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("as_view", [True, False])
def test_steps_give_the_bits_of_the_cpu(options, as_view):
    options = options | {"gradient_as_bucket_view": as_view}
    on_cpu, on_device = (ranks.run(plain, 2, kind, options) for kind in ("cpu", "fakegpu"))
    torch.testing.assert_close(on_device, on_cpu, rtol=0, atol=0)


@pytest.mark.parametrize("work", [accumulating, compressed])
def test_the_same_with(work):
    on_cpu, on_device = (ranks.run(work, 2, kind, {}) for kind in ("cpu", "fakegpu"))
    torch.testing.assert_close(on_device, on_cpu, rtol=0, atol=0)


def scaled_and_autocast():
    init_process_group("gloo")
    device = place("fakegpu")
    model = made(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("fakegpu", init_scale=8.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("fakegpu", dtype=torch.bfloat16):
            loss = model(batch(0)).float().pow(2).mean()
        scaler.scale(loss).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert fakegpu.races() == []
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_grad_scaler_and_autocast_train_alike():
    first, second = ranks.run(scaled_and_autocast, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def refusals():
    init_process_group("gloo")
    device = place("fakegpu")
    net = Net().to(device)
    with pytest.raises(ValueError, match="can only be None or contain a single element"):
        DistributedDataParallel(net, device_ids=[0, 1])
    with pytest.raises(ArgumentError, match="device_ids names device 3, and the model is on"):
        DistributedDataParallel(net, device_ids=[3])
    with pytest.raises(
        ArgumentError, match="device_ids names fakegpu device 0, and the model is on cpu"
    ):
        DistributedDataParallel(Net(), device_ids=[0])
    with pytest.raises(ArgumentError, match="output_device is 0 and device_ids is None"):
        DistributedDataParallel(net, output_device=0)
    net.last.cpu()
    with pytest.raises(ArgumentError, match="one process trains on one device"):
        DistributedDataParallel(net)
    assert DistributedDataParallel(Net().to(device)).device_ids is None
    layers = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)).to(device)
    DistributedDataParallel(layers)


def test_devices_that_do_not_fit_are_refused():
    ranks.run(refusals, 1)
